/*
 * The end of a runtime: draining, leaving, closing. See runtime.h; the phases are in runtime.c.
 */
#include "app/runtime_state.h"
#include "core/killpoint.h"
#include "core/log.h"

#define HASTY_MS 2000

static void begin_closing(struct mill_runtime *runtime);

static void on_deadline(uv_timer_t *timer)
{
	struct mill_runtime *runtime = mill_container_of(timer, struct mill_runtime, deadline);
	if (!runtime->killing) {
		runtime->killing = true;
		mill_reload_kill(runtime->reload);
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		return;
	}
	if (!mill_reload_is_empty(runtime->reload)) {
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		return; /* killed, but not gone yet: until then its handlers may act */
	}
	/* The database did not take what is left. The lease frees those messages in time. */
	size_t held = mill_settle_held(runtime->settle);
	if (held > 0) {
		mill_err_set(
		        &runtime->err, MILL_ERR_UNREACHED,
		        "%zu outcomes could not be written before the stop: their messages run "
		        "again when this worker's lease is over",
		        held);
		mill_log(MILL_LOG_ERROR, "outcomes_unwritten", MILL_INT("messages", held));
		if (runtime->exit_code == 0)
			runtime->exit_code = 1;
	}
	begin_closing(runtime);
}

void mill_runtime_stop(struct mill_runtime *runtime)
{
	if (runtime->phase >= LEAVING)
		return;
	if (runtime->phase == DRAINING) {
		if (runtime->hasty)
			return;
		runtime->hasty = runtime->killing = true;
		if (runtime->exit_code == 0)
			runtime->exit_code = 3;
		mill_reload_kill(runtime->reload);
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		return;
	}
	runtime->phase = DRAINING;
	mill_log(MILL_LOG_INFO, "stopping",
	         MILL_INT("running", mill_dispatch_held(runtime->dispatch)),
	         MILL_NUMBER("wait_secs", mill_runtime_settings(runtime)->shutdown_secs));
	if (runtime->claim != NULL)
		mill_claim_stop(runtime->claim);
	mill_reload_drain(runtime->reload);
	uint64_t wait_ms = (uint64_t)(mill_runtime_settings(runtime)->shutdown_secs * 1000);
	uv_timer_start(&runtime->deadline, on_deadline, wait_ms, 0);
}

static void on_left(void *context)
{
	begin_closing(context);
}

void mill_runtime_check_drained(struct mill_runtime *runtime)
{
	if (runtime->phase != DRAINING)
		return;
	mill_dispatch_release(runtime->dispatch);
	bool claimed = runtime->claim != NULL && !mill_claim_is_settled(runtime->claim);
	if (!mill_reload_is_empty(runtime->reload) || mill_dispatch_held(runtime->dispatch) > 0 ||
	    claimed || mill_settle_held(runtime->settle) > 0)
		return;
	MILL_KILL_POINT("leaving");
	runtime->phase = LEAVING;
	if (runtime->lease != NULL) {
		runtime->killing =
		        true; /* the deadline ends a farewell that is not answered, too */
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		mill_lease_leave(runtime->lease, on_left, runtime);
	} else {
		begin_closing(runtime);
	}
}

static void on_all_closed(struct mill_runtime *runtime)
{
	mill_log(MILL_LOG_INFO, "stopped", MILL_INT("exit_code", runtime->exit_code));
	bool failed = runtime->err.kind != MILL_ERR_NONE;
	runtime->options.on_stopped(runtime->exit_code, failed ? &runtime->err : NULL,
	                            runtime->options.context);
}

static void on_closed(void *context)
{
	struct mill_runtime *runtime = context;
	if (--runtime->to_close == 0)
		on_all_closed(runtime);
}

static void on_deadline_closed(uv_handle_t *handle)
{
	on_closed(mill_container_of(handle, struct mill_runtime, deadline));
}

/* The links are closed, so nobody answers any more: the modules can go. */
static void close_modules(struct mill_runtime *runtime)
{
	/* A claim may have been answered when the end was decided already. */
	mill_dispatch_release(runtime->dispatch);
	mill_settle_forget(runtime->settle);
	mill_dispatch_free(runtime->dispatch);
	runtime->to_close = 4 + (runtime->claim != NULL) + (runtime->lease != NULL) +
	                    (runtime->listener != NULL);
	mill_settle_close(runtime->settle, on_closed, runtime);
	mill_relay_close(runtime->relay, on_closed, runtime);
	mill_reload_close(runtime->reload, on_closed, runtime);
	uv_close((uv_handle_t *)&runtime->deadline, on_deadline_closed);
	if (runtime->listener != NULL)
		mill_listener_close(runtime->listener, on_closed, runtime);
	if (runtime->claim != NULL)
		mill_claim_close(runtime->claim, on_closed, runtime);
	if (runtime->lease != NULL)
		mill_lease_close(runtime->lease, on_closed, runtime);
}

static void on_link_closed(void *context)
{
	struct mill_runtime *runtime = context;
	if (--runtime->to_close == 0)
		close_modules(runtime);
}

static void on_turn_closed(uv_handle_t *handle)
{
	struct mill_runtime *runtime = mill_container_of(handle, struct mill_runtime, turn);
	runtime->to_close = (int)mill_links_close(runtime->links, on_link_closed, runtime);
}

static void begin_closing(struct mill_runtime *runtime)
{
	if (runtime->phase == CLOSING)
		return;
	runtime->phase = CLOSING;
	uv_timer_stop(&runtime->deadline);
	uv_close((uv_handle_t *)&runtime->turn, on_turn_closed);
}
