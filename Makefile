# Front door to the build. CMake does the work (CMakePresets.json); this file only names it.
#
#   BUILD=build/asan   the build folder that `build` and `test` use; its last part is the preset
#   SPEC=spec/unit     the specs that `test` runs, all by default

BUILD ?= build/debug
SPEC ?= spec
MAKEFLAGS += --no-print-directory

# $(call build,FOLDER): configures the folder once, by the preset of its name, and builds it. Progress
# is for a person at a terminal who has not built there before: the rest is short.
define build
	@echo "building $(1)"
	@test -f $(1)/build.ninja || { mkdir -p $(1) && cmake --preset $(notdir $(1)) >$(1)/configure.log 2>&1; } || \
		{ cat $(1)/configure.log; exit 1; }
	@if test -t 1 && test ! -x $(1)/tidemill; then cmake --build $(1); else \
		said=$$(cmake --build $(1) -- --quiet 2>&1); code=$$?; \
		printf '%s\n' "$$said" | grep -v -e '^ninja: no work to do' -e '^$$'; exit $$code; fi
endef

.PHONY: help build run test check asan-test bench-claim clean

help:
	@echo "make build      build the program into $(BUILD)"
	@echo "make run        install what is missing, build, and start the sample app with its own Postgres"
	@echo "make test       install what is missing, build, and run the specs; SPEC=spec/unit for a part"
	@echo "make check      include rules, luacheck, formatting, documentation of the keys"
	@echo "make asan-test  the specs against a build with address and undefined behaviour sanitizers"
	@echo "make bench-claim  what Postgres gives to our own statements, as a table: bench/README.md"
	@echo "make clean      remove all builds"

build:
	@script/setup build
	$(call build,$(BUILD))

run:
	@script/setup build
	$(call build,build/release)
	@exec build/release/tidemill dev --sample

test:
	@script/setup test
	$(call build,$(BUILD))
	@echo "testing $(BUILD): $(SPEC)"
	@TIDEMILL_BUILD=$(BUILD) script/with-postgres busted --lua=luajit $(SPEC)

check:
	@echo "checking the include rules"
	@script/check-layers
	@if command -v luacheck >/dev/null; then \
		echo "checking Lua"; luacheck --quiet --no-color . || exit 1; \
	else echo "luacheck is not installed: skipped"; fi
	@if command -v clang-format >/dev/null; then \
		echo "checking the format of C"; bad=; \
		for file in $$(find src include fuzz -name '*.[ch]' 2>/dev/null | sort); do \
			clang-format --dry-run --Werror "$$file" 2>/dev/null || { echo "$$file"; bad=1; }; \
		done; \
		test -z "$$bad" || { echo "run clang-format -i on these files"; exit 1; }; \
	else echo "clang-format is not installed: skipped"; fi
	@if [ -x $(BUILD)/tidemill ] && command -v luajit >/dev/null; then \
		echo "checking the documentation"; script/check-docs $(BUILD)/tidemill || exit 1; \
		echo "checking the annotations"; script/check-annotations $(BUILD)/tidemill || exit 1; \
	else echo "$(BUILD)/tidemill is not built: the documentation is not checked"; fi

# The specs load the library under test into luajit, which was not built with the sanitizer: its
# run-time library is preloaded there, and only there. What luajit leaves unfreed at its end is no
# finding; what our own programs leave is.
asan-test: BUILD = build/asan
asan-test:
	@script/setup test
	$(call build,$(BUILD))
	@echo "testing $(BUILD): $(SPEC)"
	@TIDEMILL_BUILD=$(BUILD) TIDEMILL_TEST_PATIENCE=4 UBSAN_OPTIONS=print_stacktrace=1 \
		TIDEMILL_TEST_CHILD_ASAN_OPTIONS=detect_leaks=1:exitcode=99 \
		script/with-postgres env ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" \
		busted --lua=luajit $(SPEC)

bench-claim: BUILD = build/release
bench-claim:
	@script/setup test
	$(call build,$(BUILD))
	@cmake --build $(BUILD) --target bench_claim -- --quiet
	@TIDEMILL_BUILD=$(BUILD) bench/claim.sh

clean:
	rm -rf build
