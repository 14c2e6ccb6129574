/*
 * libFuzzer target: any bytes are decoded, or refused with a message; what was decoded can be
 * encoded (but for NUL bytes), and decoded and encoded again it has the same length: the order of
 * an object's keys may change, nothing else.
 *
 * clang -fsanitize=fuzzer,address,undefined, with src/executor/json*.c and src/core/.
 */
#include <lauxlib.h>
#include <lualib.h>

#include "executor/json.h"

static lua_State *L;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	L = luaL_newstate();
	MILL_ASSERT(L != NULL);
	luaL_openlibs(L);
	mill_json_open(L);
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_buffer first = { 0 }, second = { 0 };
	/* Just as large as it is, so that the sanitizer sees a read behind the end. */
	char *text = mill_alloc(size);
	memcpy(text, data, size);
	int rc = mill_json_decode(L, text, size, &err);
	free(text);
	if (rc != 0) {
		MILL_ASSERT(lua_gettop(L) == 0);
		MILL_ASSERT(strncmp(err.message, "not JSON at byte ", 17) == 0);
		return 0;
	}
	MILL_ASSERT(lua_gettop(L) == 1);
	if (mill_json_encode(L, 1, "value", &first, &err) == 0) {
		MILL_ASSERT(mill_json_decode(L, first.data, first.len, &err) == 0);
		MILL_ASSERT(mill_json_encode(L, 2, "value", &second, &err) == 0);
		MILL_ASSERT(first.len == second.len);
	} else {
		MILL_ASSERT(strstr(err.message, "NUL byte") != NULL);
		MILL_ASSERT(first.len == 0);
	}
	lua_settop(L, 0);
	mill_buffer_free(&first);
	mill_buffer_free(&second);
	return 0;
}
