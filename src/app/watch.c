/*
 * Files and when they change: see watch.h.
 *
 *     an event, or two seconds ──► look ──► as before: rest
 *                                   ▲  └──► other than before: look again in a moment
 *                                   │                               │
 *                                   └── still other ────────────────┤
 *                                                  the same as then: told
 */
#include "app/watch.h"

#include <stdlib.h>

#include "app/scan.h"
#include "core/clock.h"
#include "core/digest.h"
#include "core/log.h"

#define POLL_MS 2000
#define QUIET_MS 50      /* nothing may happen for so long before it looks */
#define BUSY_NS 1e9      /* while something happens all the time, it looks all the same */
#define UNSETTLED_NS 3e9 /* what does not come to rest is told all the same */
#define FILES_MOST 50000 /* beyond, no more are watched */
#define TOLD_MOST 3      /* of the same content: then who loads it reads it otherwise */

struct file {
	char *path;
	uint64_t handled; /* what it held when it was loaded, or its change was told */
	uint64_t seen;    /* what it held at the last look */
	uint64_t told;    /* what it held when it was last told of */
	unsigned times;   /* how often in a row it was told of with that */
	uint64_t stamp;
	uint32_t tag;
	bool in_tree; /* found by looking */
};

/* One watched folder. */
struct folder {
	struct mill_watch *watch;
	uv_fs_event_t event;
	char *path;
	uint64_t identity;
	bool tree;
	struct folder *next;
};

struct mill_watch {
	struct mill_watch_options options;
	bool on, polls_only;
	char *tree;
	struct file *files; /* in the order of their paths */
	size_t file_count;
	struct folder *folders;

	struct mill_scan scan; /* the one under way, which has the thread's */
	size_t known;          /* its files that were known before */
	struct mill_scan last; /* whose points hold */
	uv_work_t work;
	bool scanning;
	bool adopts; /* files that nobody has loaded are new to us, and no change */
	uv_timer_t poll, quiet;
	uint64_t event_ns;     /* since when something happens; 0: nothing does */
	uint64_t unsettled_ns; /* since when files are other than handled; 0: they are not */
	uint64_t difference;   /* a digest of how they were at the last look */
	struct mill_log_gate gate;

	size_t closing;
	bool closed;
	void (*on_closed)(void *context);
	void *closed_context;
};

static void on_quiet(uv_timer_t *timer);

/* ---- the list of files --------------------------------------------------------------------- */

/* Its place, or where it would be. */
static size_t place_of(const struct mill_watch *watch, const char *path, bool *found)
{
	size_t low = 0, high = watch->file_count;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		if (strcmp(watch->files[middle].path, path) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	*found = low < watch->file_count && strcmp(watch->files[low].path, path) == 0;
	return low;
}

static struct file *find_or_add(struct mill_watch *watch, const char *path, bool *added)
{
	bool found;
	size_t at = place_of(watch, path, &found);
	*added = !found;
	if (found)
		return &watch->files[at];
	watch->files =
	        mill_realloc(watch->files, (watch->file_count + 1) * sizeof(watch->files[0]));
	memmove(&watch->files[at + 1], &watch->files[at],
	        (watch->file_count - at) * sizeof(watch->files[0]));
	watch->file_count++;
	watch->files[at] = (struct file){ .path = mill_strdup(path) };
	return &watch->files[at];
}

void mill_watch_file(struct mill_watch *watch, const struct mill_file *given, uint32_t tag,
                     bool newest)
{
	if (watch->file_count >= FILES_MOST)
		return;
	char *path = mill_span_dup(given->path);
	bool added;
	struct file *file = find_or_add(watch, path, &added);
	free(path);
	if (added)
		file->seen = given->digest;
	if (added || (newest && file->tag < tag))
		file->handled = given->digest;
	file->tag = tag;
}

static void remove_files(struct mill_watch *watch, bool (*goes)(const struct file *, uint32_t),
                         uint32_t tag)
{
	size_t kept = 0;
	for (size_t i = 0; i < watch->file_count; i++) {
		if (goes(&watch->files[i], tag))
			free(watch->files[i].path);
		else
			watch->files[kept++] = watch->files[i];
	}
	watch->file_count = kept;
}

static bool is_old(const struct file *file, uint32_t tag)
{
	return file->tag < tag && !file->in_tree;
}

void mill_watch_keep(struct mill_watch *watch, uint32_t tag)
{
	remove_files(watch, is_old, tag);
}

/* ---- events of folders --------------------------------------------------------------------- */

static void wait_for_quiet(struct mill_watch *watch);

static bool ends_with_name(const char *path, const char *name)
{
	const char *slash = strrchr(path, '/');
	return strcmp(slash ? slash + 1 : path, name) == 0;
}

/* A log that is written beside config.lua, an editor's own files: no reason to look. */
static bool matters(const struct folder *folder, const char *name)
{
	if (name == NULL || ends_with_name(folder->path, name))
		return true;
	const char *dot = strrchr(name, '.');
	if (folder->tree && name[0] != '.' && (dot == NULL || strcmp(dot, ".lua") == 0))
		return true;
	char *path = strcmp(folder->path, ".") == 0   ? mill_strdup(name)
	             : strcmp(folder->path, "/") == 0 ? mill_sprintf("/%s", name)
	                                              : mill_sprintf("%s/%s", folder->path, name);
	bool is_point = mill_scan_has_point(&folder->watch->last, path);
	free(path);
	return is_point;
}

static void on_event(uv_fs_event_t *event, const char *name, int events, int status)
{
	struct folder *folder = mill_container_of(event, struct folder, event);
	(void)events;
	if (status != 0 || matters(folder, name))
		wait_for_quiet(folder->watch);
}

static void check_closed(struct mill_watch *watch);

static void on_folder_closed(uv_handle_t *handle)
{
	struct folder *folder = mill_container_of(handle, struct folder, event);
	struct mill_watch *watch = folder->watch;
	free(folder->path);
	free(folder);
	check_closed(watch);
}

static void close_folder(struct folder *folder)
{
	folder->watch->closing++;
	uv_close((uv_handle_t *)&folder->event, on_folder_closed);
}

static void open_folder(struct mill_watch *watch, const struct mill_scan_folder *found)
{
	struct folder *folder = mill_calloc(1, sizeof(*folder));
	folder->watch = watch;
	folder->path = mill_strdup(found->path);
	folder->identity = found->identity;
	folder->tree = found->tree;
	MILL_ASSERT(uv_fs_event_init(watch->options.loop, &folder->event) == 0);
	int code = uv_fs_event_start(&folder->event, on_event, folder->path, 0);
	uint64_t skipped;
	if (code != 0 && code != UV_ENOENT && mill_log_gate(&watch->gate, 3600, &skipped))
		mill_log(MILL_LOG_WARN, "watch_limited", MILL_TEXT("folder", folder->path),
		         MILL_TEXT("error", uv_strerror(code)),
		         MILL_INT("looks_every_ms", POLL_MS));
	folder->next = watch->folders;
	watch->folders = folder;
}

static bool still_wanted(const struct folder *folder, const struct mill_scan *scan)
{
	for (size_t i = 0; i < scan->folder_count; i++)
		if (strcmp(scan->folders[i].path, folder->path) == 0)
			return scan->folders[i].identity == folder->identity &&
			       scan->folders[i].tree == folder->tree;
	return false;
}

static bool is_open(const struct mill_watch *watch, const char *path)
{
	for (const struct folder *folder = watch->folders; folder; folder = folder->next)
		if (strcmp(folder->path, path) == 0)
			return true;
	return false;
}

/* The same folders as the last look found; one that was replaced is another. */
static void follow_folders(struct mill_watch *watch, const struct mill_scan *scan)
{
	struct folder **at = &watch->folders;
	while (*at != NULL) {
		struct folder *folder = *at;
		if (scan != NULL && still_wanted(folder, scan)) {
			at = &folder->next;
			continue;
		}
		*at = folder->next;
		close_folder(folder);
	}
	for (size_t i = 0; scan != NULL && !watch->polls_only && i < scan->folder_count; i++)
		if (scan->folders[i].identity != 0 && !is_open(watch, scan->folders[i].path))
			open_folder(watch, &scan->folders[i]);
}

/* ---- what a look has found ----------------------------------------------------------------- */

static void take_scanned(struct mill_watch *watch, const struct mill_scan *scan, size_t known)
{
	bool found, added;
	for (size_t i = 0; i < scan->file_count; i++) {
		const struct mill_scan_file *scanned = &scan->files[i];
		size_t at = place_of(watch, scanned->path, &found);
		if (!found && i < known)
			continue; /* forgotten meanwhile */
		struct file *file =
		        found ? &watch->files[at] : find_or_add(watch, scanned->path, &added);
		file->in_tree = scanned->in_tree;
		file->seen = scanned->digest;
		file->stamp = scanned->stamp;
	}
}

static bool is_changed(const struct file *file)
{
	return file->seen != file->handled && (file->seen != file->told || file->times < TOLD_MOST);
}

/* How the files differ from what is handled; 0: they do not. */
static uint64_t difference(const struct mill_watch *watch)
{
	uint64_t digest = 0;
	for (size_t i = 0; i < watch->file_count; i++) {
		const struct file *file = &watch->files[i];
		if (!is_changed(file))
			continue;
		if (digest == 0)
			digest = MILL_DIGEST_BEGIN;
		digest = mill_digest_more(digest, file->path, strlen(file->path));
		digest = mill_digest_more(digest, &file->seen, sizeof(file->seen));
	}
	return digest;
}

static bool is_gone(const struct file *file, uint32_t tag)
{
	(void)tag;
	return file->tag == 0 && file->seen == 0 && file->handled == 0;
}

/* All that has changed is known now. Returns one of those, for the caller to free, or NULL. */
static char *handle(struct mill_watch *watch)
{
	char *first = NULL;
	for (size_t i = 0; i < watch->file_count; i++) {
		struct file *file = &watch->files[i];
		if (is_changed(file)) {
			if (first == NULL)
				first = mill_strdup(file->path);
			file->times = file->seen == file->told ? file->times + 1 : 1;
			file->told = file->seen;
		}
		file->handled = file->seen;
	}
	watch->unsettled_ns = watch->difference = 0;
	remove_files(watch, is_gone, 0);
	return first;
}

static void tell(struct mill_watch *watch)
{
	char *path = handle(watch);
	if (path != NULL)
		watch->options.on_change(path, watch->options.context);
	free(path);
}

static void adopt(struct mill_watch *watch)
{
	watch->adopts = false;
	for (size_t i = 0; i < watch->file_count; i++)
		if (watch->files[i].tag == 0)
			watch->files[i].handled = watch->files[i].seen;
}

static void conclude(struct mill_watch *watch)
{
	if (watch->adopts)
		adopt(watch);
	uint64_t now = mill_clock_ns(), found = difference(watch);
	if (found == 0) {
		watch->unsettled_ns = watch->difference = 0;
		return;
	}
	if (watch->unsettled_ns == 0)
		watch->unsettled_ns = now;
	if (found == watch->difference || (double)(now - watch->unsettled_ns) > UNSETTLED_NS) {
		tell(watch);
		return;
	}
	watch->difference = found;
	wait_for_quiet(watch);
}

/* ---- looking ------------------------------------------------------------------------------- */

static void scan_in_thread(uv_work_t *work)
{
	struct mill_watch *watch = mill_container_of(work, struct mill_watch, work);
	mill_scan_run(&watch->scan);
}

static void take_scan(struct mill_watch *watch)
{
	uint64_t skipped;
	if (watch->scan.cut && mill_log_gate(&watch->gate, 3600, &skipped))
		mill_log(MILL_LOG_WARN, "watch_limited", MILL_TEXT("folder", watch->tree),
		         MILL_TEXT("error", "it has too many files: not all are watched"));
	take_scanned(watch, &watch->scan, watch->known);
	follow_folders(watch, &watch->scan);
	mill_scan_free(&watch->last);
	watch->last = watch->scan;
	watch->scan = (struct mill_scan){ 0 };
	conclude(watch);
}

static void on_scanned(uv_work_t *work, int status)
{
	struct mill_watch *watch = mill_container_of(work, struct mill_watch, work);
	watch->scanning = false;
	if (!watch->closed && watch->on && status == 0)
		take_scan(watch);
	mill_scan_free(&watch->scan);
	check_closed(watch);
}

static void look(struct mill_watch *watch)
{
	if (watch->scanning) {
		uv_timer_start(&watch->quiet, on_quiet, QUIET_MS, 0);
		return;
	}
	struct mill_scan *scan = &watch->scan;
	scan->tree = mill_strdup(watch->tree);
	scan->files = mill_calloc(watch->file_count, sizeof(scan->files[0]));
	for (size_t i = 0; i < watch->file_count; i++)
		scan->files[i] = (struct mill_scan_file){
			.path = mill_strdup(watch->files[i].path),
			.digest = watch->files[i].seen,
			.stamp = watch->files[i].stamp,
		};
	scan->file_count = watch->known = watch->file_count;
	watch->scanning = true;
	watch->closing++;
	uv_queue_work(watch->options.loop, &watch->work, scan_in_thread, on_scanned);
}

static void on_quiet(uv_timer_t *timer)
{
	struct mill_watch *watch = mill_container_of(timer, struct mill_watch, quiet);
	watch->event_ns = 0;
	look(watch);
}

static void wait_for_quiet(struct mill_watch *watch)
{
	uint64_t now = mill_clock_ns();
	if (watch->event_ns == 0)
		watch->event_ns = now;
	bool waits = uv_is_active((uv_handle_t *)&watch->quiet);
	if (!waits || (double)(now - watch->event_ns) < BUSY_NS)
		uv_timer_start(&watch->quiet, on_quiet, QUIET_MS, 0);
}

static void on_poll(uv_timer_t *timer)
{
	struct mill_watch *watch = mill_container_of(timer, struct mill_watch, poll);
	if (!watch->scanning && !uv_is_active((uv_handle_t *)&watch->quiet))
		look(watch);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_watch *mill_watch_new(const struct mill_watch_options *options)
{
	struct mill_watch *watch = mill_calloc(1, sizeof(*watch));
	const char *how = getenv("TIDEMILL_WATCH");
	watch->options = *options;
	watch->polls_only = how != NULL && strcmp(how, "poll") == 0;
	MILL_ASSERT(uv_timer_init(options->loop, &watch->poll) == 0);
	MILL_ASSERT(uv_timer_init(options->loop, &watch->quiet) == 0);
	return watch;
}

void mill_watch_set(struct mill_watch *watch, bool on, const char *tree)
{
	bool other = watch->tree == NULL || strcmp(watch->tree, tree) != 0;
	if (other) {
		free(watch->tree);
		watch->tree = mill_strdup(tree);
		for (size_t i = 0; i < watch->file_count; i++)
			watch->files[i].in_tree = false;
	}
	if (on && (other || !watch->on))
		watch->adopts = true;
	watch->on = on;
	if (on) {
		uv_timer_start(&watch->poll, on_poll, POLL_MS, POLL_MS);
		wait_for_quiet(watch);
		return;
	}
	uv_timer_stop(&watch->poll);
	uv_timer_stop(&watch->quiet);
	follow_folders(watch, NULL);
}

static void check_closed(struct mill_watch *watch)
{
	if (--watch->closing > 0 || !watch->closed)
		return;
	for (size_t i = 0; i < watch->file_count; i++)
		free(watch->files[i].path);
	free(watch->files);
	mill_scan_free(&watch->last);
	free(watch->tree);
	void (*on_closed)(void *) = watch->on_closed;
	void *context = watch->closed_context;
	free(watch);
	on_closed(context);
}

static void on_poll_closed(uv_handle_t *handle)
{
	check_closed(mill_container_of(handle, struct mill_watch, poll));
}

static void on_quiet_closed(uv_handle_t *handle)
{
	check_closed(mill_container_of(handle, struct mill_watch, quiet));
}

void mill_watch_close(struct mill_watch *watch, void (*on_closed)(void *context), void *context)
{
	watch->on = false;
	follow_folders(watch, NULL);
	watch->closed = true;
	watch->on_closed = on_closed;
	watch->closed_context = context;
	watch->closing += 2;
	uv_close((uv_handle_t *)&watch->poll, on_poll_closed);
	uv_close((uv_handle_t *)&watch->quiet, on_quiet_closed);
}
