/*
 * `tidemill dev`: the worker with a Postgres of its own around it, and a first screen that says
 * what is wired to what and what to type next.
 */
#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "app/child.h"
#include "app/devdb.h"
#include "cli/sample.h"
#include "cli/worker.h"
#include "core/log.h"
#include "core/policy.h"
#include "pg/housekeeping.h"
#include "pg/session.h"

struct dev {
	struct mill_cli *cli;
	struct mill_manifest manifest;
	char *dsn;
	struct mill_devdb *devdb; /* NULL: the database is somebody else's */
	char *sample;             /* a JSON array for publish_many, or NULL */
};

/* ---- the first screen ------------------------------------------------------------------------ */

/* Text for stdout, written by a thread: a stdout that nobody reads must not stop the work. */
struct screen {
	char *text;
	size_t len;
};

static void write_screen(void *job)
{
	struct screen *screen = job;
	for (size_t done = 0; done < screen->len;) {
		ssize_t n = write(STDOUT_FILENO, screen->text + done, screen->len - done);
		if (n > 0)
			done += (size_t)n;
		else if (errno != EINTR)
			return;
	}
}

static void free_screen(void *job)
{
	struct screen *screen = job;
	free(screen->text);
	free(screen);
}

static char *sample_path(const struct dev *dev)
{
	char *folder = mill_cli_folder(dev->cli);
	char *path = mill_sprintf("%s/sample.jsonl", folder);
	free(folder);
	return path;
}

/* The command that publishes, as it is typed where this was: a message of the sample, or any. */
static void print_publish(FILE *out, const struct dev *dev)
{
	const struct mill_cli *cli = dev->cli;
	char *program = mill_cli_shell_word(cli->program);
	fprintf(out, "%s publish", program);
	free(program);
	if (cli->config_given) {
		char *path = mill_cli_shell_word(cli->config_path);
		fprintf(out, " -c %s", path);
		free(path);
	}
	if (cli->database != NULL) {
		char *dsn = mill_cli_shell_word(cli->database);
		fprintf(out, " --database %s", dsn);
		free(dsn);
	}
	char *path = sample_path(dev), *topic = NULL, *message = NULL;
	if (mill_sample_first(path, &topic, &message) != 0) {
		topic = mill_strdup(dev->manifest.lane_count ? dev->manifest.lanes[0].topic
		                                             : "some.topic");
		message = mill_strdup("{\"id\": 1}");
	}
	char *word = mill_cli_shell_word(topic), *json = mill_cli_shell_word(message);
	fprintf(out, " %s %s\n", word, json);
	free(word);
	free(json);
	free(topic);
	free(message);
	free(path);
}

/* Where all of it lies, as it is typed to be rid of it. */
static void print_delete(FILE *out, const struct dev *dev)
{
	const char *outer = mill_devdb_outer_folder(dev->devdb);
	char *own = mill_cli_shell_word(mill_devdb_own_folder(dev->devdb));
	char *other = mill_cli_shell_word(outer ? outer : "");
	fprintf(out, "  delete    once it is stopped: rm -rf %s%s%s\n", own, outer ? " " : "",
	        outer ? other : "");
	free(own);
	free(other);
}

static void print_screen(FILE *out, const struct dev *dev)
{
	const struct mill_manifest *manifest = &dev->manifest;
	fprintf(out, "\nThe app \"%s\" is up.\n\n", manifest->settings.app);
	if (manifest->lane_count > 0)
		mill_cli_print_lanes(out, manifest, 2);
	else
		fprintf(out, "  %s subscribes to nothing yet\n", dev->cli->config_path);
	char *dsn = mill_cli_shell_word(dev->dsn);
	if (dev->devdb != NULL) {
		fprintf(out, "\n  database  a Postgres of its own in %s; messages stay there\n",
		        mill_devdb_folder(dev->devdb));
		print_delete(out, dev);
	} else {
		char *where = mill_cli_describe(dev->dsn);
		fprintf(out, "\n  database  %s, named by %s; no server was started\n", where,
		        dev->cli->database ? "--database" : dev->cli->config_path);
		free(where);
	}
	if (dev->sample != NULL)
		fprintf(out, "  sample    the messages of sample.jsonl are published, as at each "
		             "start with --sample\n");
	fprintf(out, "  stop      Ctrl-C\n\nIn another terminal, in this folder:\n\n");
	if (dev->devdb != NULL)
		fprintf(out, "  look      psql %s\n", dsn);
	fprintf(out, "  publish   ");
	print_publish(out, dev);
	fprintf(out, "\n");
	free(dsn);
}

/* ---- sample messages ------------------------------------------------------------------------- */

struct sample {
	const struct dev *dev;
	int64_t published;
	int outcome;
	struct mill_err err;
};

static void publish_sample(void *job)
{
	struct sample *sample = job;
	const struct dev *dev = sample->dev;
	struct mill_session *session;
	sample->outcome = mill_session_open(dev->dsn, "tidemill sample", &session, &sample->err);
	if (sample->outcome != 0)
		return;
	char *schema = mill_policy_quote_identifier(dev->manifest.settings.schema);
	char *sql =
	        mill_sprintf("select count(*) from %s.publish_many($1::jsonb, 'sample')", schema);
	const char *params[] = { dev->sample };
	struct mill_rows *rows;
	sample->outcome = mill_session_query(session, sql, 1, params, &rows, &sample->err);
	if (sample->outcome == 0) {
		sample->published = mill_rows_int8(rows, 0, 0);
		mill_rows_free(rows);
	}
	free(sql);
	free(schema);
	mill_session_close(session);
}

static void on_sample_published(void *job)
{
	struct sample *sample = job;
	if (sample->outcome == 0)
		mill_log(MILL_LOG_INFO, "sample_published", MILL_INT("messages", sample->published),
		         MILL_TEXT("hint", "each start with --sample publishes them again"));
	else
		mill_log(MILL_LOG_WARN, "sample_not_published",
		         MILL_TEXT("error", sample->err.message));
	free(sample);
}

static void on_ready(struct mill_worker *worker, void *context)
{
	struct dev *dev = context;
	struct screen *screen = mill_calloc(1, sizeof(*screen));
	FILE *out = open_memstream(&screen->text, &screen->len);
	MILL_ASSERT(out != NULL);
	print_screen(out, dev);
	fclose(out);
	mill_worker_background(worker, write_screen, free_screen, screen);
	if (dev->sample != NULL) {
		struct sample *sample = mill_calloc(1, sizeof(*sample));
		sample->dev = dev;
		mill_worker_background(worker, publish_sample, on_sample_published, sample);
	}
}

/* ---- the command ----------------------------------------------------------------------------- */

static int open_database(struct dev *dev, struct mill_err *err)
{
	struct mill_settings *settings = &dev->manifest.settings;
	const char *named = dev->cli->database ? dev->cli->database : settings->database;
	if (named != NULL) {
		dev->dsn = mill_strdup(named);
		return 0;
	}
	/* An address for LISTEN belongs to a database that is not used here. */
	free(settings->listen_database);
	settings->listen_database = NULL;
	char *folder = mill_cli_folder(dev->cli);
	int result = mill_devdb_open(folder, &dev->devdb, err);
	free(folder);
	if (result == 0)
		dev->dsn = mill_strdup(mill_devdb_dsn(dev->devdb));
	return result;
}

static int prepare(struct dev *dev, struct mill_err *err)
{
	/* With the handlers: a mistake in one is told before a server is made for nothing. */
	if (mill_cli_load(dev->cli, MILL_LOAD_HANDLERS, &dev->manifest, err) != 0)
		return -1;
	if (mill_cli_value(dev->cli, "sample") != NULL) {
		char *path = sample_path(dev);
		dev->sample = mill_sample_read(path, err);
		free(path);
		if (dev->sample == NULL)
			return -1;
	}
	return open_database(dev, err);
}

/* ---- while it runs --------------------------------------------------------------------------- */

/* Has the process that a worker's row names ended? Our own number is that of an earlier life. */
static bool is_over(int64_t pid)
{
	return pid > 0 && (pid == getpid() || (kill((pid_t)pid, 0) != 0 && errno == ESRCH));
}

static bool go_on(const struct mill_housekeeping_counts *counts, void *context)
{
	(void)counts;
	(void)context;
	return true;
}

/*
 * A `dev` that was killed left its lease, which would hold what it ran for minutes yet. Workers of
 * a private server are processes of this machine, so it can be seen that one is no more.
 */
static int bury_killed(const struct mill_housekeeping *queue, const char *host,
                       const struct mill_settings *settings, struct mill_err *err)
{
	static const char find[] = "select id, pid from {schema}.worker where host = $1";
	static const char end[] = "update {schema}.worker set lease_until = '-infinity'"
	                          " where id = $1";
	const char *params[] = { host };
	struct mill_rows *rows;
	if (mill_housekeeping_query(queue, find, 1, params, &rows, err) != 0)
		return -1;
	int64_t over = 0;
	int result = 0;
	for (int i = 0; i < mill_rows_count(rows) && result == 0; i++) {
		params[0] = mill_rows_text(rows, i, 0);
		if (!is_over(mill_rows_int8(rows, i, 1)))
			continue;
		over++;
		result = mill_housekeeping_query(queue, end, 1, params, NULL, err);
	}
	mill_rows_free(rows);
	struct mill_housekeeping_counts counts = { 0 };
	if (result != 0 || over == 0)
		return result;
	if (mill_housekeeping_reclaim(queue, settings->lease_secs, go_on, NULL, &counts, err) != 0)
		return -1;
	mill_log(MILL_LOG_INFO, "killed_workers_buried", MILL_INT("workers", over),
	         MILL_INT("messages", counts.returned + counts.failed));
	return 0;
}

static int before_start(void *context, struct mill_err *err)
{
	struct dev *dev = context;
	const struct mill_settings *settings = &dev->manifest.settings;
	char host[64] = "";
	gethostname(host, sizeof(host) - 1);
	struct mill_housekeeping queue = { .schema = settings->schema,
		                           .table = settings->table,
		                           .prefix = settings->prefix };
	if (mill_session_open(dev->dsn, "tidemill dev", &queue.session, err) != 0)
		return -1;
	int result = bury_killed(&queue, host, settings, err);
	mill_session_close(queue.session);
	return result;
}

static int watch(void *context, struct mill_err *err)
{
	struct dev *dev = context;
	return mill_devdb_watch(dev->devdb, err);
}

int mill_cli_dev(struct mill_cli *cli)
{
	mill_signals_hold();
	mill_child_keep_from(3);
	/* On the heap, and left there when a thread still looks at it. */
	struct dev *dev = mill_calloc(1, sizeof(*dev));
	dev->cli = cli;
	struct mill_err err = MILL_ERR_INIT;
	int code;
	if (prepare(dev, &err) == 0)
		code = mill_worker_run(&(struct mill_worker_options){
		        .cli = cli,
		        .manifest = &dev->manifest,
		        .dsn = dev->dsn,
		        .ends_with_terminal = true,
		        .before_start =
		                dev->devdb && dev->manifest.settings.migrate ? before_start : NULL,
		        .watch = dev->devdb ? watch : NULL,
		        .on_ready = on_ready,
		        .context = dev,
		});
	else if (mill_signals_waiting())
		code = MILL_EXIT_OK;
	else
		code = mill_cli_fail(&err);
	/* The loop is gone and its handlers with it: one more Ctrl-C must not leave the server
	 * behind. */
	mill_signals_hold();
	if (dev->devdb != NULL)
		mill_devdb_close(dev->devdb);
	if (!cli->leave_at_once) {
		mill_manifest_free(&dev->manifest);
		free(dev->sample);
		free(dev->dsn);
		free(dev);
	}
	return code;
}
