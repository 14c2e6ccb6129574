/* One coroutine, one delivery: see task.h. */
#include "executor/task_state.h"

#include <lauxlib.h>
#include <stdio.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/policy.h"
#include "core/uuid.h"
#include "executor/fence.h"

#define ERROR_TEXT_MAX (16 * 1024)       /* bytes of an outcome's error; the ledger keeps fewer */
#define MEMORY_TEXT "not enough memory"  /* LuaJIT's own words */
#define FILES_TEXT "Too many open files" /* strerror's, in whatever a library says around them */
#define QUICK_NS 1000000                 /* a handler that holds the processor for less is quick */
#define DELAY_MAX_SECS (366.0 * 86400)

/* ---- the end of a delivery ---------------------------------------------------------------- */

/* A coroutine that is suspended or died of an error cannot run another delivery. */
static void discard_coroutine(struct mill_task *task)
{
	luaL_unref(task->tasks->options.vm->L, LUA_REGISTRYINDEX, task->co_ref);
	task->co_ref = LUA_NOREF;
	task->co = NULL;
}

static struct mill_span cut_error(struct mill_span error)
{
	size_t len = mill_policy_boundary(error.data, error.len, ERROR_TEXT_MAX);
	/* A text without boundaries is no UTF-8, and is cut anywhere. */
	if (error.len > ERROR_TEXT_MAX && len + 4 < ERROR_TEXT_MAX)
		len = ERROR_TEXT_MAX;
	return (struct mill_span){ error.data, len };
}

/* The one place where a delivery ends: its outcome goes out, its task waits for the next one. */
static void finish(struct mill_task *task, enum mill_outcome_kind kind, double delay_secs,
                   struct mill_span error)
{
	struct mill_tasks *tasks = task->tasks;
	MILL_ASSERT(task->wait.op == NULL);
	struct mill_outcome outcome = {
		.ticket = task->ticket,
		.kind = kind,
		.delay_secs = delay_secs,
		.error = error.data ? cut_error(error) : MILL_SPAN_NONE,
		.result = task->result,
	};
	mill_wait_release(&task->wait);
	/* What ctx:finish published is in the database already, unless there is none. */
	bool publishes = kind == MILL_OUTCOME_DONE ||
	                 (kind == MILL_OUTCOME_FINISHED && task->wait.fence.data == NULL);
	if (publishes && task->publications.len > 0) {
		mill_buffer_text(&task->publications, "]");
		outcome.publications =
		        (struct mill_span){ task->publications.data, task->publications.len };
	}
	mill_outcome_write(tasks->options.out, &outcome);
	mill_buffer_free(&task->publications);
	uv_timer_stop(&task->limit);
	mill_list_remove(&tasks->running, &task->node);
	/* To the front: what was used last is warm. */
	mill_list_push_front(&tasks->idle, &task->node);
}

static int l_collect(lua_State *L)
{
	lua_gc(L, LUA_GCCOLLECT, 0);
	return 0;
}

/*
 * LuaJIT does not collect when memory runs out, it raises; of open files it knows nothing. What the
 * handler held is garbage now, and unless it goes every later delivery fails too.
 */
static bool is_exhaustion(struct mill_span error)
{
	return error.data != NULL &&
	       (strcmp(error.data, MEMORY_TEXT) == 0 ||
	        memmem(error.data, error.len, FILES_TEXT, strlen(FILES_TEXT)) != NULL);
}

static void collect_if_exhausted(struct mill_tasks *tasks, bool exhausted)
{
	struct mill_err err = MILL_ERR_INIT;
	if (!exhausted)
		return;
	if (mill_vm_call(tasks->options.vm, l_collect, NULL, &err) != 0)
		mill_log(MILL_LOG_WARN, "finalizer_failed", MILL_TEXT("error", err.message));
	if (mill_fence_is_out_of_files())
		atomic_store_explicit(&tasks->options.page->worn, 1, memory_order_relaxed);
}

/* What the coroutine's main function returned: nothing, the error as text, or nil and the result.
 */
static void finish_returned(struct mill_task *task)
{
	struct mill_span error = MILL_SPAN_NONE;
	if (lua_gettop(task->co) > 0)
		error.data = lua_tolstring(task->co, 1, &error.len);
	if (lua_gettop(task->co) > 1)
		task->result.data = lua_tolstring(task->co, 2, &task->result.len);
	bool exhausted = is_exhaustion(error);
	finish(task, error.data ? MILL_OUTCOME_RAISED : MILL_OUTCOME_DONE, 0, error);
	task->result = MILL_SPAN_NONE;
	lua_settop(task->co, 0);
	collect_if_exhausted(task->tasks, exhausted);
}

/* The main function itself failed: no memory, or an error while an error was rendered. */
static void finish_died(struct mill_task *task, int status)
{
	struct mill_span error = MILL_SPAN("the handler raised an error that has no text");
	if (lua_type(task->co, -1) == LUA_TSTRING)
		error.data = lua_tolstring(task->co, -1, &error.len);
	finish(task, MILL_OUTCOME_RAISED, 0, error);
	discard_coroutine(task);
	collect_if_exhausted(task->tasks, status == LUA_ERRMEM);
}

/* ---- on the processor --------------------------------------------------------------------- */

static int l_mend(lua_State *L)
{
	const struct mill_tasks *tasks = lua_touserdata(L, 1);
	lua_rawgeti(L, LUA_REGISTRYINDEX, tasks->mend_ref);
	lua_call(L, 0, 0);
	return 0;
}

/* The handler changed something of the library: the next one is to find it as it was. */
static void mend(struct mill_tasks *tasks)
{
	struct mill_err err = MILL_ERR_INIT;
	tasks->bent = false;
	if (mill_vm_call(tasks->options.vm, l_mend, tasks, &err) != 0)
		mill_log(MILL_LOG_WARN, "not_mended", MILL_TEXT("error", err.message));
}

/* Hand the processor to the handler, and tell the blame page so. Returns lua_resume's status. */
static int resume(struct mill_task *task, int arguments)
{
	struct mill_tasks *tasks = task->tasks;
	struct mill_page *page = tasks->options.page;
	MILL_ASSERT(tasks->current == NULL);
	uint64_t now = mill_clock_ns();
	bool *quick = &tasks->quick[task->lane - tasks->options.loaded->manifest.lanes];
	tasks->options.before_run(tasks->options.context, now, *quick);
	if (task->deadline_ns == 0)
		task->deadline_ns = now + (uint64_t)(task->lane->options.timeout_secs * 1e9);
	atomic_store_explicit(&page->since_ns, now, memory_order_relaxed);
	atomic_store_explicit(&page->deadline_ns, task->deadline_ns, memory_order_relaxed);
	atomic_store_explicit(&page->ticket, task->ticket, memory_order_release);
	tasks->current = task;
	tasks->options.vm->speaker = &task->speaker;

	int status = lua_resume(task->co, arguments);
	/* A handler forked: the executor that this is a copy of goes on, and answers. */
	if (mill_fence_is_copy())
		_exit(1);
	/* A hook belongs to the whole state: the next delivery is not to be called by it. */
	lua_sethook(task->tasks->options.vm->L, NULL, 0, 0);

	*quick = mill_clock_ns() - now < QUICK_NS;
	tasks->options.vm->speaker = NULL;
	tasks->current = NULL;
	/* What they point to is valid for this one run. */
	task->wait.ended = NULL;
	task->wait.failed = false;
	task->wait.reply = MILL_SPAN_NONE;
	atomic_store_explicit(&page->ticket, 0, memory_order_release);
	atomic_store_explicit(&page->heap_bytes, mill_vm_heap_bytes(tasks->options.vm),
	                      memory_order_relaxed);
	if (tasks->bent)
		mend(tasks);
	return status;
}

/* ctx:retry, ctx:snooze, ctx:discard: ops that are never answered. */
static const struct ending {
	const char *name;
	enum mill_outcome_kind kind;
	const char *why; /* when the handler gives no reason */
} endings[] = {
	{ "retry", MILL_OUTCOME_RETRY, "the handler asked for a retry" },
	{ "snooze", MILL_OUTCOME_SNOOZE, NULL },
	{ "discard", MILL_OUTCOME_DISCARD, "the handler discarded the message" },
};

static const struct ending *find_ending(const char *name)
{
	for (size_t i = 0; i < MILL_COUNT(endings); i++)
		if (strcmp(endings[i].name, name) == 0)
			return &endings[i];
	return NULL;
}

/* (wait, name, secs, why) */
static int end_delivery(struct mill_task *task, const struct ending *ending, struct mill_err *err)
{
	double secs = lua_tonumber(task->co, 3);
	if (!(secs >= 0 && secs <= DELAY_MAX_SECS))
		return mill_err_set(err, MILL_ERR_INPUT, "%s: expected seconds from 0 to %.0f",
		                    ending->name, DELAY_MAX_SECS);
	struct mill_span why = ending->why ? MILL_SPAN(ending->why) : MILL_SPAN_NONE;
	if (lua_type(task->co, 4) == LUA_TSTRING)
		why.data = lua_tolstring(task->co, 4, &why.len);
	finish(task, ending->kind, secs, why);
	discard_coroutine(task);
	return 0;
}

static void start_limit(struct mill_task *task);
static struct mill_span with_traceback(struct mill_task *task, struct mill_span text,
                                       struct mill_buffer *shown);
static void finish_stray(struct mill_task *task);

/*
 * The handler yielded: start what it asks for. 0: it waits, or the delivery has ended; −1: what it
 * asks for cannot be had, for the reason in `err`.
 */
static int on_yield(struct mill_task *task, struct mill_err *err)
{
	lua_State *co = task->co;
	if (lua_gettop(co) < 2 || lua_touserdata(co, 1) != task->tasks->wait ||
	    lua_type(co, 2) != LUA_TSTRING) {
		finish_stray(task);
		return 0;
	}
	const char *name = lua_tostring(co, 2);
	const struct mill_op *op = mill_op_find(name);
	const struct ending *ending = op ? NULL : find_ending(name);
	if (ending != NULL)
		return end_delivery(task, ending, err);
	if (op == NULL)
		return mill_err_set(err, MILL_ERR_INPUT, "there is no op `%s` to wait for", name);
	if (mill_wait_start(&task->wait, op, co, 3, err) != 0)
		return -1;
	start_limit(task);
	return 0;
}

/* Run until the next wait, or the end. */
static void run(struct mill_task *task, int arguments)
{
	/* Outlives each turn: a refusal is read by the coroutine in the next one. */
	struct mill_err err = MILL_ERR_INIT;
	for (;;) {
		int status = resume(task, arguments);
		if (status == 0)
			return finish_returned(task);
		if (status != LUA_YIELD)
			return finish_died(task, status);
		if (on_yield(task, &err) == 0)
			return;
		lua_settop(task->co, 0);
		task->wait.failed = true;
		task->wait.reply = MILL_SPAN(err.message);
		arguments = 0;
	}
}

/* The op has ended the delivery. */
static void finish_by_op(struct mill_task *task)
{
	struct mill_buffer shown = { 0 };
	struct mill_span error = task->wait.reply;
	if (error.data != NULL)
		error = with_traceback(task, error, &shown);
	task->wait.ends = false;
	finish(task, task->wait.ending, 0, error);
	discard_coroutine(task);
	mill_buffer_free(&shown);
}

static void on_wake(struct mill_wait *wait)
{
	struct mill_task *task = mill_container_of(wait, struct mill_task, wait);
	if (wait->ends)
		return finish_by_op(task);
	lua_settop(task->co, 0);
	run(task, 0);
}

/* ---- dropped where it stands -------------------------------------------------------------- */

/* A text and the coroutine that is suspended, for its traceback. */
struct standing {
	struct mill_task *task;
	struct mill_span text;
	struct mill_buffer *shown;
};

static int l_standing(lua_State *L)
{
	const struct standing *standing = lua_touserdata(L, 1);
	lua_rawgeti(L, LUA_REGISTRYINDEX, standing->task->tasks->waiting_ref);
	lua_rawgeti(L, LUA_REGISTRYINDEX, standing->task->co_ref);
	lua_pushlstring(L, standing->text.data, standing->text.len);
	lua_call(L, 2, 1);
	size_t len;
	const char *shown = luaL_checklstring(L, -1, &len);
	mill_buffer_bytes(standing->shown, shown, len);
	return 0;
}

/* `text` and where the handler stands; only `text` when that cannot be said. */
static struct mill_span with_traceback(struct mill_task *task, struct mill_span text,
                                       struct mill_buffer *shown)
{
	struct standing standing = { task, text, shown };
	if (mill_vm_call(task->tasks->options.vm, l_standing, &standing, NULL) != 0)
		return text;
	return (struct mill_span){ shown->data, shown->len };
}

/* It yielded something that is no wait: nobody would ever resume it. */
static void finish_stray(struct mill_task *task)
{
	struct mill_buffer shown = { 0 };
	struct mill_span text =
	        MILL_SPAN("coroutine.yield outside of a coroutine of the handler's own");
	finish(task, MILL_OUTCOME_RAISED, 0, with_traceback(task, text, &shown));
	discard_coroutine(task);
	mill_buffer_free(&shown);
}

/*
 * End a delivery that waits. The error is raised at its wait so that it can clean up, but what
 * comes of that changes nothing: it may not wait again.
 */
static void drop(struct mill_task *task, enum mill_outcome_kind kind, struct mill_span text,
                 struct mill_span error)
{
	mill_wait_cancel(&task->wait);
	task->wait.failed = true;
	task->wait.reply = text;
	lua_settop(task->co, 0);
	int status = resume(task, 0);
	finish(task, kind, 0, error);
	if (status == 0)
		lua_settop(task->co, 0);
	else
		discard_coroutine(task);
}

static void on_limit(uv_timer_t *timer)
{
	struct mill_task *task = mill_container_of(timer, struct mill_task, limit);
	struct mill_buffer shown = { 0 };
	char text[80];
	snprintf(text, sizeof(text), "handler exceeded its time limit of %g s",
	         task->lane->options.timeout_secs);
	struct mill_span error = with_traceback(task, MILL_SPAN(text), &shown);
	drop(task, MILL_OUTCOME_RAISED, MILL_SPAN(text), error);
	mill_buffer_free(&shown);
}

/* Most handlers never wait, so the timer starts at the first wait, with what is left. */
static void start_limit(struct mill_task *task)
{
	if (uv_is_active((uv_handle_t *)&task->limit))
		return;
	uint64_t now = mill_clock_ns();
	uint64_t left = task->deadline_ns > now ? task->deadline_ns - now : 0;
	uv_update_time(task->tasks->options.loop);
	MILL_ASSERT(uv_timer_start(&task->limit, on_limit, (left + 999999) / 1000000, 0) == 0);
}

void mill_tasks_cancel(struct mill_tasks *tasks, const struct mill_cancel *cancel)
{
	mill_list_each(node, &tasks->running)
	{
		struct mill_task *task = mill_container_of(node, struct mill_task, node);
		if (task->ticket != cancel->ticket)
			continue;
		struct mill_span reason =
		        cancel->reason.data ? cancel->reason : MILL_SPAN("cancelled");
		drop(task, MILL_OUTCOME_DISCARD, reason, reason);
		return;
	}
}

/* ---- the beginning of a delivery ---------------------------------------------------------- */

static int l_new_coroutine(lua_State *L)
{
	struct mill_task *task = lua_touserdata(L, 1);
	lua_State *co = lua_newthread(L);
	task->co_ref = luaL_ref(L, LUA_REGISTRYINDEX);
	task->co = co;
	return 0;
}

static struct mill_task *new_task(struct mill_tasks *tasks)
{
	struct mill_task *task = mill_calloc(1, sizeof(*task));
	task->tasks = tasks;
	task->co_ref = LUA_NOREF;
	MILL_ASSERT(uv_timer_init(tasks->options.loop, &task->limit) == 0);
	mill_wait_init(&task->wait, &tasks->ops);
	return task;
}

static struct mill_task *take_idle(struct mill_tasks *tasks)
{
	struct mill_link_node *node = mill_list_shift(&tasks->idle);
	return node ? mill_container_of(node, struct mill_task, node) : new_task(tasks);
}

void mill_tasks_deliver(struct mill_tasks *tasks, const struct mill_deliver *deliver)
{
	const struct mill_loaded *loaded = tasks->options.loaded;
	MILL_ASSERT(loaded->handlers && deliver->lane < loaded->manifest.lane_count);
	if (tasks->quick == NULL)
		tasks->quick = mill_calloc(loaded->manifest.lane_count, sizeof(tasks->quick[0]));
	struct mill_task *task = take_idle(tasks);
	task->ticket = deliver->ticket;
	task->lane = &loaded->manifest.lanes[deliver->lane];
	task->deadline_ns = 0;
	mill_uuid_text(deliver->id, task->message_id);
	task->speaker = (struct mill_speaker){
		.message_id = task->message_id,
		.topic = task->lane->topic,
		.subscriber = task->lane->subscriber,
		.attempt = deliver->attempts,
	};
	task->published_by.len = 0;
	mill_buffer_bytes(&task->published_by, deliver->published_by.data,
	                  deliver->published_by.len);
	task->wait.ticket = deliver->ticket;
	task->wait.published_by =
	        task->published_by.len > 0
	                ? (struct mill_span){ task->published_by.data, task->published_by.len }
	                : MILL_SPAN("");
	task->fence.len = 0;
	mill_buffer_bytes(&task->fence, deliver->fence.data, deliver->fence.len);
	task->wait.fence = task->fence.len > 0
	                           ? (struct mill_span){ task->fence.data, task->fence.len }
	                           : MILL_SPAN_NONE;
	task->wait.speaker = &task->speaker;
	task->wait.publications = &task->publications;
	mill_list_push(&tasks->running, &task->node);

	struct mill_err err = MILL_ERR_INIT;
	if (task->co == NULL && mill_vm_call(tasks->options.vm, l_new_coroutine, task, &err) != 0)
		return finish(task, MILL_OUTCOME_RAISED, 0, MILL_SPAN(err.message));
	/* Nothing here allocates, so nothing can raise: the rest of the start is Lua's, protected.
	 */
	lua_rawgeti(task->co, LUA_REGISTRYINDEX, tasks->main_ref);
	lua_rawgeti(task->co, LUA_REGISTRYINDEX, loaded->lanes_ref);
	lua_rawgeti(task->co, -1, (int)deliver->lane + 1);
	lua_remove(task->co, -2);
	task->starting = deliver;
	run(task, 1);
	task->starting = NULL;
}

/* ---- all tasks ---------------------------------------------------------------------------- */

static int l_init(lua_State *L)
{
	struct mill_tasks *tasks = lua_touserdata(L, 1);
	mill_vm_push_host(L);
	mill_task_open_host(L, tasks);
	tasks->wait = lua_newuserdata(L, 1);
	lua_pushvalue(L, -1);
	tasks->wait_ref = luaL_ref(L, LUA_REGISTRYINDEX);
	lua_setfield(L, -2, "wait");
	mill_vm_push(L, "tidemill.task", "main");
	tasks->main_ref = luaL_ref(L, LUA_REGISTRYINDEX);
	mill_vm_push(L, "tidemill.render", "waiting");
	tasks->waiting_ref = luaL_ref(L, LUA_REGISTRYINDEX);
	mill_vm_push(L, "tidemill.fences", "mend");
	tasks->mend_ref = luaL_ref(L, LUA_REGISTRYINDEX);
	return 0;
}

int mill_tasks_init(struct mill_tasks *tasks, const struct mill_tasks_options *options,
                    struct mill_err *err)
{
	*tasks = (struct mill_tasks){
		.options = *options,
		.main_ref = LUA_NOREF,
		.waiting_ref = LUA_NOREF,
		.wait_ref = LUA_NOREF,
		.mend_ref = LUA_NOREF,
	};
	mill_list_init(&tasks->running);
	mill_list_init(&tasks->idle);
	mill_ops_init(&tasks->ops, options->loop, options->out, on_wake);
	if (mill_vm_call(options->vm, l_init, tasks, err) == 0)
		return 0;
	mill_tasks_fini(tasks);
	return -1;
}

void mill_tasks_close(struct mill_tasks *tasks)
{
	mill_list_each(node, &tasks->running)
	{
		struct mill_task *task = mill_container_of(node, struct mill_task, node);
		mill_wait_cancel(&task->wait);
		mill_wait_release(&task->wait);
	}
	mill_list_append(&tasks->idle, &tasks->running);
	mill_list_each(node, &tasks->idle)
	{
		struct mill_task *task = mill_container_of(node, struct mill_task, node);
		mill_wait_close(&task->wait);
		uv_close((uv_handle_t *)&task->limit, NULL);
	}
	mill_ops_close(&tasks->ops);
}

void mill_tasks_fini(struct mill_tasks *tasks)
{
	lua_State *L = tasks->options.vm->L;
	for (struct mill_link_node *node; (node = mill_list_shift(&tasks->idle)) != NULL;) {
		struct mill_task *task = mill_container_of(node, struct mill_task, node);
		luaL_unref(L, LUA_REGISTRYINDEX, task->co_ref);
		mill_buffer_free(&task->published_by);
		mill_buffer_free(&task->fence);
		mill_buffer_free(&task->publications);
		free(task);
	}
	luaL_unref(L, LUA_REGISTRYINDEX, tasks->main_ref);
	luaL_unref(L, LUA_REGISTRYINDEX, tasks->waiting_ref);
	luaL_unref(L, LUA_REGISTRYINDEX, tasks->wait_ref);
	luaL_unref(L, LUA_REGISTRYINDEX, tasks->mend_ref);
	mill_ops_fini(&tasks->ops);
	free(tasks->quick);
}
