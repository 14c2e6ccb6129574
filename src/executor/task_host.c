/*
 * `tidemill.host`: what the modules of lua/tidemill/ ask about the delivery that runs. Each
 * function is called from inside its coroutine, so it may raise, and run out of memory, like any
 * Lua function.
 */
#include "executor/task_state.h"

#include <lauxlib.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "core/digest.h"
#include "executor/fence.h"
#include "executor/json.h"

#define PUBLICATIONS_MAX (64 * 1024 * 1024) /* bytes of what one delivery publishes when done */

/* ---- texts of a delivery ------------------------------------------------------------------ */

/* `2026-01-31T23:59:59.123456Z` into `text`. */
static void write_created_at(struct mill_tasks *tasks, int64_t created_at, char *text, size_t size)
{
	int64_t second = created_at / 1000000, rest = created_at % 1000000;
	if (rest < 0) {
		second -= 1;
		rest += 1000000;
	}
	if (tasks->second_text[0] == '\0' || tasks->second != second) {
		time_t at = (time_t)second;
		struct tm utc;
		if (gmtime_r(&at, &utc) == NULL ||
		    strftime(tasks->second_text, sizeof(tasks->second_text), "%Y-%m-%dT%H:%M:%S",
		             &utc) == 0)
			snprintf(tasks->second_text, sizeof(tasks->second_text),
			         "9999-12-31T23:59:59");
		tasks->second = second;
	}
	snprintf(text, size, "%s.%06dZ", tasks->second_text, (int)rest);
}

static double wall_clock_secs(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- tidemill.host: what the modules ask about the delivery that runs --------------------- */

static struct mill_tasks *tasks_of(lua_State *L)
{
	return lua_touserdata(L, lua_upvalueindex(1));
}

static struct mill_task *current_of(lua_State *L)
{
	struct mill_task *task = tasks_of(L)->current;
	if (task == NULL)
		luaL_error(L, "no handler runs");
	return task;
}

/* running() → whether a handler runs */
static int l_running(lua_State *L)
{
	lua_pushboolean(L, tasks_of(L)->current != NULL);
	return 1;
}

/* owns(message_id) → whether that message is the one that runs */
static int l_owns(lua_State *L)
{
	const struct mill_task *task = tasks_of(L)->current;
	const char *message_id = lua_tostring(L, 1);
	lua_pushboolean(L, task && message_id && strcmp(task->message_id, message_id) == 0);
	return 1;
}

static void push_span(lua_State *L, struct mill_span span)
{
	lua_pushlstring(L, span.data ? span.data : "", span.len);
}

static void push_json(lua_State *L, struct mill_span text, const char *what)
{
	struct mill_err err = MILL_ERR_INIT;
	if (mill_json_decode(L, text.data, text.len, &err) != 0)
		luaL_error(L, "the %s cannot be read: %s", what, err.message);
}

/*
 * take() → message_id, attempts, max_attempts, priority, created_at, published_by, deadline, raw,
 * payload, headers, wants_result: the delivery that starts. The frame it came in is gone after the
 * first wait.
 */
static int l_take(lua_State *L)
{
	struct mill_task *task = current_of(L);
	const struct mill_deliver *deliver = task->starting;
	if (deliver == NULL)
		return luaL_error(L, "no delivery starts");
	task->starting = NULL;
	char created_at[64];
	write_created_at(task->tasks, deliver->created_at, created_at, sizeof(created_at));
	luaL_checkstack(L, 11, "a delivery");
	lua_pushlstring(L, task->message_id, sizeof(task->message_id) - 1);
	lua_pushnumber(L, deliver->attempts);
	lua_pushnumber(L, deliver->max_attempts);
	lua_pushinteger(L, deliver->priority);
	lua_pushstring(L, created_at);
	push_span(L, deliver->published_by);
	lua_pushnumber(L, wall_clock_secs() + task->lane->options.timeout_secs);
	push_span(L, deliver->payload);
	push_json(L, deliver->payload, "payload");
	if (deliver->headers.data != NULL)
		push_json(L, deliver->headers, "headers");
	else
		lua_pushnil(L);
	lua_pushboolean(L, deliver->wants_result);
	return 11;
}

/* outcome() → the result of the wait that has just ended, or nil and why it failed */
static int l_outcome(lua_State *L)
{
	struct mill_wait *wait = &current_of(L)->wait;
	if (wait->failed) {
		lua_pushnil(L);
		push_span(L, wait->reply);
		return 2;
	}
	if (wait->ended == NULL)
		return luaL_error(L, "nothing was waited for");
	return wait->ended->result(wait, L);
}

/* gather(json): publish it together with this message's `done`. Returns nothing, or what is wrong
 */
static int l_gather(lua_State *L)
{
	struct mill_buffer *gathered = &current_of(L)->publications;
	size_t len;
	const char *json = luaL_checklstring(L, 1, &len);
	if (gathered->len + len > PUBLICATIONS_MAX) {
		lua_pushfstring(L, "one delivery cannot publish more than %d bytes",
		                PUBLICATIONS_MAX);
		return 1;
	}
	mill_buffer_text(gathered, gathered->len == 0 ? "[" : ",");
	mill_buffer_bytes(gathered, json, len);
	return 0;
}

/* gathered() → how much was gathered, for rewind */
static int l_gathered(lua_State *L)
{
	lua_pushnumber(L, (double)current_of(L)->publications.len);
	return 1;
}

/* rewind(mark): what was gathered since then is not published after all */
static int l_rewind(lua_State *L)
{
	struct mill_buffer *gathered = &current_of(L)->publications;
	double mark = luaL_checknumber(L, 1);
	if (mark >= 0 && mark < (double)gathered->len)
		gathered->len = (size_t)mark;
	return 0;
}

/* publisher() → who published the message that runs, or nil */
static int l_publisher(lua_State *L)
{
	const struct mill_span publisher = current_of(L)->wait.published_by;
	if (publisher.len == 0)
		return 0;
	push_span(L, publisher);
	return 1;
}

/* What is gathered, for ctx:finish. */
static const luaL_Reg gathering[] = {
	{ "gathered", l_gathered },
	{ "rewind", l_rewind },
	{ "publisher", l_publisher },
	{ NULL, NULL },
};

/* bend(): the handler that runs has changed something that is to be undone after it */
static int l_bend(lua_State *L)
{
	tasks_of(L)->bent = true;
	return 0;
}

/* newest_child() → the number of the process that was started last, or 0 */
static int l_newest_child(lua_State *L)
{
	lua_pushinteger(L, mill_fence_newest_child());
	return 1;
}

/* end_child(pid) */
static int l_end_child(lua_State *L)
{
	int pid = luaL_checkint(L, 1);
	luaL_argcheck(L, pid > 1, 1, "no process");
	kill(pid, SIGKILL);
	return 0;
}

/*
 * file(path, text or nil): a file was loaded, or looked for and not found. In whatever order they
 * come, the same files add up to the same code.
 */
static int l_file(lua_State *L)
{
	struct mill_tasks *tasks = tasks_of(L);
	size_t len = 0;
	struct mill_file file = { .digest = 0 };
	file.path.data = luaL_checklstring(L, 1, &file.path.len);
	const char *text = luaL_optlstring(L, 2, NULL, &len);
	if (text != NULL) {
		file.digest = mill_digest_content(text, len);
		uint64_t name = mill_digest_more(MILL_DIGEST_BEGIN, file.path.data, file.path.len);
		tasks->code += mill_digest_more(name, &file.digest, sizeof(file.digest));
	}
	mill_file_write(tasks->options.out, &file);
	return 0;
}

static const luaL_Reg host_functions[] = {
	{ "running", l_running },     { "owns", l_owns },
	{ "take", l_take },           { "outcome", l_outcome },
	{ "gather", l_gather },       { "bend", l_bend },
	{ "file", l_file },           { "newest_child", l_newest_child },
	{ "end_child", l_end_child }, { NULL, NULL },
};

void mill_task_open_host(lua_State *L, struct mill_tasks *tasks)
{
	lua_pushlightuserdata(L, tasks);
	luaL_setfuncs(L, host_functions, 1);
	lua_pushlightuserdata(L, tasks);
	luaL_setfuncs(L, gathering, 1);
}
