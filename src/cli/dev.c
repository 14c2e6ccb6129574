/*
 * `tidemill dev`: the worker with a Postgres of its own around it, and a first screen that says
 * what is wired to what and what to type next.
 */
#include <errno.h>
#include <unistd.h>

#include "app/child.h"
#include "app/devdb.h"
#include "cli/worker.h"
#include "core/log.h"
#include "core/policy.h"
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

/* The command that publishes, as it is typed where this was. */
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
	fprintf(out, " %s '{\"id\": 1}'\n",
	        dev->manifest.lane_count ? dev->manifest.lanes[0].topic : "some.topic");
}

static void print_screen(FILE *out, const struct dev *dev)
{
	const struct mill_manifest *manifest = &dev->manifest;
	fprintf(out, "\nThe app \"%s\" is up.\n\n", manifest->settings.app);
	if (manifest->lane_count > 0)
		mill_cli_print_lanes(out, manifest, 2);
	else
		fprintf(out, "  %s subscribes to nothing yet\n", dev->cli->config_path);
	if (dev->devdb != NULL) {
		char *dsn = mill_cli_shell_word(dev->dsn);
		fprintf(out,
		        "\n  database  a Postgres of its own in %s; messages stay there\n"
		        "  look      psql %s\n",
		        mill_devdb_folder(dev->devdb), dsn);
		free(dsn);
	} else {
		char *where = mill_cli_describe(dev->dsn);
		fprintf(out, "\n  database  %s, named by %s; no server was started\n", where,
		        dev->cli->database ? "--database" : dev->cli->config_path);
		free(where);
	}
	fprintf(out, "  publish   ");
	print_publish(out, dev);
	fprintf(out, "  stop      Ctrl-C\n\n");
}

/* ---- sample messages ------------------------------------------------------------------------- */

/*
 * sample.jsonl beside the config: one {"topic": …, "message": …} a line, as publish_many takes
 * them.
 */
static int read_sample(struct dev *dev, struct mill_err *err)
{
	char *folder = mill_cli_folder(dev->cli), *path = mill_sprintf("%s/sample.jsonl", folder);
	free(folder);
	FILE *file = fopen(path, "re");
	int result = 0;
	if (file == NULL)
		result = mill_err_set(
		        err, MILL_ERR_USAGE,
		        "`--sample` publishes what is in %s: %s; write one {\"topic\": …, "
		        "\"message\": …} a line there, or leave it out",
		        path, strerror(errno));
	struct mill_buffer array = { 0 };
	char *line = NULL;
	size_t room = 0;
	ssize_t len;
	for (int number = 1; result == 0 && (len = getline(&line, &room, file)) >= 0; number++) {
		if (line[strspn(line, " \t\r\n")] == 0)
			continue;
		result = mill_cli_check_json(line, (size_t)len, err);
		if (result != 0)
			mill_err_wrap(err, "%s:%d", path, number);
		mill_buffer_text(&array, array.len ? "," : "[");
		mill_buffer_bytes(&array, line, (size_t)len);
	}
	if (result == 0) {
		mill_buffer_text(&array, array.len ? "]" : "[]");
		mill_buffer_bytes(&array, "", 1);
		dev->sample = mill_strdup(array.data);
	}
	free(line);
	if (file != NULL)
		fclose(file);
	mill_buffer_free(&array);
	free(path);
	return result;
}

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
		mill_log(MILL_LOG_INFO, "sample_published",
		         MILL_INT("messages", sample->published));
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
	if (mill_cli_value(dev->cli, "sample") != NULL && read_sample(dev, err) != 0)
		return -1;
	return open_database(dev, err);
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
