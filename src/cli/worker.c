/* The worker as a foreground program: see worker.h. */
#include "cli/worker.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>
#include <uv.h>

#include "app/child.h"
#include "app/runtime.h"
#include "core/log.h"
#include "pg/migrate.h"

#define RETRY_FIRST_MS 250
#define RETRY_LAST_MS 5000
#define SAY_AGAIN_SECS 30 /* the same trouble, while it lasts */
#define WATCH_MS 1000

struct mill_worker {
	struct mill_worker_options options;
	uv_loop_t loop;
	uv_signal_t terminate, interrupt, hangup;
	uv_timer_t retry, watch;
	uint64_t retry_ms;
	struct mill_log_gate gate;
	char trouble[6];              /* SQLSTATE of what was last said */
	struct mill_runtime *runtime; /* NULL: not started yet */
	bool ended, told_to_stop;
	bool failed; /* what it works with is gone: said already */
	bool has_terminal;
	unsigned jobs; /* threads at work */
	int exit_code;
};

/* What the thread that migrates works on; the loop looks at it afterwards. */
struct migration {
	struct mill_worker *worker;
	struct mill_migrate_options options;
	bool check_only;
	struct mill_migrate_result result;
	enum mill_shape shape;
	int outcome;
	struct mill_err err;
};

/* ---- the end --------------------------------------------------------------------------------- */

static void end(struct mill_worker *worker, int exit_code)
{
	if (worker->ended)
		return;
	worker->ended = true;
	worker->exit_code = exit_code;
	/* A further signal has nothing left to stop, and must not end the process in its way out.
	 */
	mill_signals_hold();
	uv_handle_t *handles[] = { (uv_handle_t *)&worker->terminate,
		                   (uv_handle_t *)&worker->interrupt,
		                   (uv_handle_t *)&worker->hangup, (uv_handle_t *)&worker->retry,
		                   (uv_handle_t *)&worker->watch };
	for (size_t i = 0; i < MILL_COUNT(handles); i++)
		uv_close(handles[i], NULL);
	/* A thread cannot be stopped; the process leaves without it, and the server rolls back. */
	if (worker->jobs > 0)
		uv_stop(&worker->loop);
}

/* Of an orderly stop by a signal: fine, unless there was something to get done. */
static int code_of_signal(const struct mill_worker *worker)
{
	if (!worker->options.until_idle)
		return MILL_EXIT_OK;
	struct mill_err err = MILL_ERR_INIT;
	mill_err_set(&err, MILL_ERR_SYSTEM, "stopped before everything was done");
	return mill_cli_fail(&err);
}

static void on_stopped(int exit_code, const struct mill_err *err, void *context)
{
	struct mill_worker *worker = context;
	if (worker->failed) {
		end(worker, MILL_EXIT_FAILURE);
		return;
	}
	if (err != NULL && err->message[0] != 0)
		mill_cli_fail(err);
	end(worker,
	    worker->told_to_stop && exit_code == MILL_EXIT_OK ? code_of_signal(worker) : exit_code);
}

static void stop(struct mill_worker *worker, const char *why)
{
	if (worker->ended)
		return;
	bool first = !worker->told_to_stop && worker->runtime != NULL;
	mill_log(MILL_LOG_INFO, "signal", MILL_TEXT("signal", why),
	         MILL_TEXT("hint", first ? "a second signal stops now" : NULL));
	worker->told_to_stop = true;
	if (worker->runtime != NULL) {
		mill_runtime_stop(worker->runtime);
		return;
	}
	int exit_code = code_of_signal(worker);
	mill_log(MILL_LOG_INFO, "stopped", MILL_INT("exit_code", exit_code));
	end(worker, exit_code);
}

/* ---- what it works with ---------------------------------------------------------------------- */

static void on_watch(uv_timer_t *timer)
{
	struct mill_worker *worker = timer->data;
	struct mill_err err = MILL_ERR_INIT;
	if (worker->failed || worker->options.watch(worker->options.context, &err) == 0)
		return;
	worker->failed = true;
	int exit_code = mill_cli_fail(&err);
	if (worker->runtime == NULL) {
		end(worker, exit_code);
		return;
	}
	/* At once: what handlers still do can be written nowhere. */
	mill_runtime_stop(worker->runtime);
	mill_runtime_stop(worker->runtime);
}

/* ---- signals --------------------------------------------------------------------------------- */

static void on_stop_signal(uv_signal_t *handle, int number)
{
	stop(handle->data, number == SIGINT ? "SIGINT" : "SIGTERM");
}

static bool terminal_is_there(void)
{
	int fd = open("/dev/tty", O_RDONLY | O_CLOEXEC | O_NOCTTY);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static void on_hangup(uv_signal_t *handle, int number)
{
	struct mill_worker *worker = handle->data;
	(void)number;
	if (worker->options.ends_with_terminal && worker->has_terminal && !terminal_is_there())
		stop(worker, "SIGHUP");
	else if (worker->runtime != NULL && !worker->ended)
		mill_runtime_reload(worker->runtime, "SIGHUP");
	else
		mill_log(MILL_LOG_INFO, "signal_ignored", MILL_TEXT("signal", "SIGHUP"),
		         MILL_TEXT("reason", "nothing is loaded yet"));
}

static void watch_signals(struct mill_worker *worker)
{
	uv_signal_init(&worker->loop, &worker->terminate);
	uv_signal_init(&worker->loop, &worker->interrupt);
	uv_signal_init(&worker->loop, &worker->hangup);
	worker->terminate.data = worker->interrupt.data = worker->hangup.data = worker;
	uv_signal_start(&worker->terminate, on_stop_signal, SIGTERM);
	uv_signal_start(&worker->interrupt, on_stop_signal, SIGINT);
	uv_signal_start(&worker->hangup, on_hangup, SIGHUP);
	mill_signals_let_through();
}

/* ---- work that blocks ------------------------------------------------------------------------ */

struct background {
	uv_work_t request;
	struct mill_worker *worker;
	void (*work)(void *job);
	void (*done)(void *job);
	void *job;
};

static void on_work(uv_work_t *request)
{
	struct background *background = request->data;
	background->work(background->job);
}

static void on_work_done(uv_work_t *request, int status)
{
	struct background *background = request->data;
	(void)status;
	background->worker->jobs--;
	background->done(background->job);
	free(background);
}

void mill_worker_background(struct mill_worker *worker, void (*work)(void *job),
                            void (*done)(void *job), void *job)
{
	struct background *background = mill_alloc(sizeof(*background));
	*background =
	        (struct background){ .worker = worker, .work = work, .done = done, .job = job };
	background->request.data = background;
	worker->jobs++;
	uv_queue_work(&worker->loop, &background->request, on_work, on_work_done);
}

/* ---- ready ----------------------------------------------------------------------------------- */

static void on_ready(void *context)
{
	struct mill_worker *worker = context;
	const struct mill_settings *settings = &worker->options.manifest->settings;
	int64_t executors =
	        settings->executors ? settings->executors : (int64_t)uv_available_parallelism();
	char *database = mill_cli_describe(worker->options.dsn);
	mill_log(MILL_LOG_INFO, "ready", MILL_TEXT("app", settings->app),
	         MILL_INT("lanes", worker->options.manifest->lane_count),
	         MILL_TEXT("only", worker->options.only), MILL_INT("executors", executors),
	         MILL_TEXT("database", database));
	free(database);
	if (worker->options.on_ready != NULL)
		worker->options.on_ready(worker, worker->options.context);
}

static void start_runtime(struct mill_worker *worker, enum mill_shape shape)
{
	struct mill_runtime_options options = {
		.loop = &worker->loop,
		.config_path = worker->options.cli->config_path,
		.database = worker->options.dsn,
		.until_idle = worker->options.until_idle,
		.only = worker->options.only,
		.manifest = worker->options.manifest,
		.shape = shape,
		.on_ready = on_ready,
		.on_stopped = on_stopped,
		.context = worker,
	};
	struct mill_err err = MILL_ERR_INIT;
	if (mill_runtime_start(&options, &worker->runtime, &err) != 0)
		end(worker, mill_cli_fail(&err));
}

/* ---- the database, up to date ---------------------------------------------------------------- */

static void migrate(void *job)
{
	struct migration *migration = job;
	if (migration->check_only)
		migration->outcome =
		        mill_migrate_check(&migration->options, &migration->shape, &migration->err);
	else
		migration->outcome =
		        mill_migrate_run(&migration->options, &migration->result, &migration->err);
	const struct mill_worker_options *options = &migration->worker->options;
	if (migration->outcome == 0 && options->before_start != NULL)
		migration->outcome = options->before_start(options->context, &migration->err);
}

static void start_migration(struct mill_worker *worker);

static void on_retry(uv_timer_t *timer)
{
	start_migration(timer->data);
}

/*
 * Trouble that time, or somebody at the database, can end: no server, one that is just starting, a
 * database or a role that is not there yet, a wrong password, a lock held by someone.
 */
static bool may_pass(const struct mill_err *err)
{
	if (err->kind == MILL_ERR_UNREACHED)
		return true;
	if (err->kind != MILL_ERR_DATABASE || err->sqlstate[0] == 0)
		return false;
	enum mill_err_reaction reaction = mill_err_database_reaction(err->sqlstate);
	return reaction == MILL_REACT_RETRY || reaction == MILL_REACT_RECONNECT ||
	       strncmp(err->sqlstate, "28", 2) == 0 || strcmp(err->sqlstate, "3D000") == 0 ||
	       strcmp(err->sqlstate, "55P03") == 0;
}

static void retry_later(struct mill_worker *worker, const struct mill_err *err)
{
	uint64_t skipped = 0;
	bool other = strcmp(worker->trouble, err->sqlstate) != 0;
	if (other)
		worker->gate = (struct mill_log_gate){ 0 };
	if (mill_log_gate(&worker->gate, SAY_AGAIN_SECS, &skipped))
		mill_log(MILL_LOG_WARN, "database_unreached", MILL_TEXT("error", err->message),
		         MILL_INT("tries", skipped + 1));
	memcpy(worker->trouble, err->sqlstate, sizeof(worker->trouble));
	uv_timer_start(&worker->retry, on_retry, worker->retry_ms, 0);
	worker->retry_ms =
	        worker->retry_ms * 2 < RETRY_LAST_MS ? worker->retry_ms * 2 : RETRY_LAST_MS;
}

static void on_migrated(void *job)
{
	struct migration *migration = job;
	struct mill_worker *worker = migration->worker;
	const struct mill_migrate_result *result = &migration->result;
	if (migration->err.kind == MILL_ERR_UNREACHED && worker->options.unnamed != NULL)
		mill_err_wrap(&migration->err, "%s", worker->options.unnamed);
	if (worker->ended) {
		/* A signal came first. */
	} else if (migration->outcome == 0) {
		if (result->from_version < result->to_version)
			mill_log(MILL_LOG_INFO, "migrated",
			         MILL_INT("from_version", result->from_version),
			         MILL_INT("to_version", result->to_version));
		bool plain = migration->shape == MILL_SHAPE_PLAIN;
		if (plain)
			mill_log(MILL_LOG_INFO, "plain_table",
			         MILL_TEXT("schema", migration->options.schema),
			         MILL_TEXT("table", migration->options.table));
		if (plain && mill_manifest_tells_failures(worker->options.manifest)) {
			mill_err_set(&migration->err, MILL_ERR_CONFIG,
			             "%s: on_failed: not available: the table %s.%s is another "
			             "program's, which tells nobody of its dead letters",
			             worker->options.cli->config_path, migration->options.schema,
			             migration->options.table);
			end(worker, mill_cli_fail(&migration->err));
		} else {
			start_runtime(worker, migration->shape);
		}
	} else if (!worker->options.until_idle && may_pass(&migration->err)) {
		retry_later(worker, &migration->err);
	} else {
		end(worker, mill_cli_fail(&migration->err));
	}
	free(migration);
}

static void start_migration(struct mill_worker *worker)
{
	struct migration *migration = mill_calloc(1, sizeof(*migration));
	migration->worker = worker;
	migration->check_only = !worker->options.manifest->settings.migrate;
	mill_cli_migrate_options(worker->options.manifest, worker->options.dsn,
	                         &migration->options);
	mill_worker_background(worker, migrate, on_migrated, migration);
}

int mill_worker_check_only(const struct mill_manifest *manifest, const char *name, const char *only,
                           struct mill_err *err)
{
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		size_t topic_len = strlen(lane->topic);
		if (strncmp(only, lane->topic, topic_len) != 0)
			continue;
		if (only[topic_len] == 0 ||
		    (only[topic_len] == '/' && strcmp(only + topic_len + 1, lane->subscriber) == 0))
			return 0;
	}
	return mill_err_set(
	        err, MILL_ERR_USAGE,
	        "`--%s` is `%s`, and the config has no such subscription: `tidemill check` "
	        "lists them, write TOPIC or TOPIC/SUBSCRIBER",
	        name, only);
}

int mill_worker_run(const struct mill_worker_options *options)
{
	/* On the heap, and left there when a thread still uses it. */
	struct mill_worker *worker = mill_calloc(1, sizeof(*worker));
	worker->options = *options;
	worker->retry_ms = RETRY_FIRST_MS;
	worker->has_terminal = terminal_is_there();
	int code = uv_loop_init(&worker->loop);
	if (code != 0) {
		struct mill_err err = MILL_ERR_INIT;
		mill_err_system(&err, code, "cannot make an event loop");
		free(worker);
		return mill_cli_fail(&err);
	}
	uv_timer_init(&worker->loop, &worker->retry);
	uv_timer_init(&worker->loop, &worker->watch);
	worker->retry.data = worker->watch.data = worker;
	if (options->watch != NULL)
		uv_timer_start(&worker->watch, on_watch, WATCH_MS, WATCH_MS);
	watch_signals(worker);
	start_migration(worker);
	uv_run(&worker->loop, UV_RUN_DEFAULT);

	int exit_code = worker->exit_code;
	if (worker->runtime != NULL)
		mill_runtime_free(worker->runtime);
	if (worker->jobs > 0) {
		options->cli->leave_at_once = true;
		return exit_code;
	}
	MILL_ASSERT(uv_loop_close(&worker->loop) == 0);
	free(worker);
	return exit_code;
}
