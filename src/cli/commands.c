/* The table of commands. */
#include "cli/cli.h"

static const struct mill_option dev_options[] = {
	{ "sample", 0, NULL,
	  "publish the messages of sample.jsonl, beside the config, once all runs" },
	{ 0 },
};

static const struct mill_option run_options[] = {
	{ "only", 0, "LANE", "claim for TOPIC or TOPIC/SUBSCRIBER alone; nothing else changes" },
	{ 0 },
};

static const struct mill_option migrate_options[] = {
	{ "print", 0, NULL, "print the SQL that makes a new schema, and change nothing" },
	{ "to", 0, "N", "go to version N at most (default: the newest)" },
	{ 0 },
};

static const struct mill_option publish_options[] = {
	{ "delay", 0, "SECONDS", "not before so many seconds from now" },
	{ "at", 0, "TIME", "not before this time, such as 2030-01-31T08:00:00Z" },
	{ "priority", 0, "N", "-9 to 9, smaller first (default 0)" },
	{ "dedupe-key", 0, "KEY", "at most one unfinished message with this key per subscriber" },
	{ "max-attempts", 0, "N",
	  "starts before it is a dead letter (default: the subscription's)" },
	{ "by", 0, "WHO", "the publisher's name (default: the database user)" },
	{ "lines", 0, NULL,
	  "a message a line: of the file in the place of JSON, or of standard input" },
	{ 0 },
};

static const struct mill_option drain_options[] = {
	{ "topic", 0, "LANE", "for TOPIC or TOPIC/SUBSCRIBER alone" },
	{ 0 },
};

static const struct mill_option status_options[] = {
	{ "watch", 0, NULL, "look again every 2 s until Ctrl-C" },
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

static const struct mill_option failed_list_options[] = {
	{ "topic", 0, "TOPIC", "those of this topic alone" },
	{ "limit", 0, "N", "how many at most, the newest first (default 50)" },
	{ "json", 0, NULL, "print a JSON array" },
	{ 0 },
};

static const struct mill_option failed_retry_options[] = {
	{ "topic", 0, "TOPIC", "all failed messages of this topic" },
	{ "all", 0, NULL, "all failed messages" },
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

static const struct mill_option failed_discard_options[] = {
	{ "why", 0, "TEXT", "kept with the message (default: discarded)" },
	{ "topic", 0, "TOPIC", "all failed messages of this topic" },
	{ "all", 0, NULL, "all failed messages" },
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

static const struct mill_option cancel_options[] = {
	{ "dedupe-key", 0, "KEY", "the unfinished messages with this key, one per subscriber" },
	{ "topic", 0, "TOPIC", "with --dedupe-key: those of this topic alone" },
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

static const struct mill_option reschedule_options[] = {
	{ "at", 0, "TIME", "such as 2030-01-31T08:00:00Z; a time that has passed means now" },
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

/* Of commands that print something for people and have no other option. */
static const struct mill_option json_options[] = {
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

static const struct mill_option reload_options[] = {
	{ "app", 0, "APP", "workers of this app (default: the config's)" },
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

const struct mill_command mill_cli_commands[] = {
	{
	        .name = "init",
	        .synopsis = "[DIR]",
	        .summary = "Begin an app: write a config, a first handler and its spec",
	        .details =
	                "Into DIR, or the current folder. Nothing that is there is overwritten.\n",
	        .max_operands = 1,
	        .run = mill_cli_init,
	},
	{
	        .name = "dev",
	        .synopsis = "[--sample]",
	        .summary = "Run the app in this folder with a Postgres of its own",
	        .details =
	                "Makes and starts a private Postgres in .tidemill beside the config, "
	                "with a unix\n"
	                "socket and no TCP port, brings its schema up to date and works until "
	                "Ctrl-C, which\n"
	                "stops the server too. Messages are still there the next time. Where "
	                "the config or\n"
	                "--database names a database, that one is used. A file that you save "
	                "is loaded at\n"
	                "once; one that does not load is told, and changes nothing.\n"
	                "\n"
	                "Root's server runs under the account postgres. Where that account cannot "
	                "reach the\n"
	                "folder, the data lies in /var/tmp/tidemill-…, which .tidemill/where "
	                "names, and the\n"
	                "first screen too. To delete everything, stop dev and remove .tidemill and "
	                "that folder.\n",
	        .options = dev_options,
	        .silent = true,
	        .run = mill_cli_dev,
	},
	{
	        .name = "run",
	        .synopsis = "[--only TOPIC[/SUBSCRIBER]]",
	        .summary = "Run the worker in the foreground",
	        .details = "Brings the schema up to date (unless the config says `migrate = "
	                   "false`) and calls\n"
	                   "handlers until it is told to end. While the database cannot be "
	                   "reached, it goes on\n"
	                   "trying. SIGTERM or SIGINT: claims no more and waits for running "
	                   "handlers, up to\n"
	                   "shutdown_secs; a second one: stops now. SIGHUP, or a changed file: "
	                   "loads config and\n"
	                   "handlers anew.\n",
	        .options = run_options,
	        .silent = true,
	        .run = mill_cli_run,
	},
	{
	        .name = "check",
	        .synopsis = "[--json]",
	        .summary = "Load the config and every handler, and list what is wired to what",
	        .details = "Needs no database. A mistake is told as file:line.\n",
	        .options = json_options,
	        .run = mill_cli_check,
	},
	{
	        .name = "migrate",
	        .synopsis = "[--print] [--to N]",
	        .summary = "Create the schema, or bring it up to date",
	        .details =
	                "Safe to run at any time and by several at once. `run` and `dev` do the "
	                "same at\n"
	                "their start. Without a config, only a database is needed (--database).\n",
	        .options = migrate_options,
	        .run = mill_cli_migrate,
	},
	{
	        .name = "publish",
	        .synopsis = "TOPIC [JSON or -] [option…]",
	        .summary = "Publish a message",
	        .details =
	                "The message is any JSON value, {} when left out; `-` reads it from "
	                "standard input.\n"
	                "Prints {\"id\":…,\"topic\":…,\"delivered\":N,\"duplicate\":false}; "
	                "delivered counts the\n"
	                "subscribers that will get it. The database is that of --database, of "
	                "the config, of\n"
	                "a running `tidemill dev` in the config's folder, or of the PG* "
	                "variables.\n"
	                "\n"
	                "With --lines, a file (or `-`) stands in the place of JSON and each line "
	                "of it is a\n"
	                "message; the options hold for all. They are published 500 at a time, "
	                "each time all or\n"
	                "none: a line that is wrong ends it, and it is said which lines are "
	                "published. The last\n"
	                "line printed is {\"published\":N,\"delivered\":M}.\n",
	        .options = publish_options,
	        .min_operands = 1,
	        .max_operands = 2,
	        .run = mill_cli_publish,
	},
	{
	        .name = "call",
	        .synopsis = "HANDLER [JSON or -]",
	        .summary = "Run one handler once, without the queue, and print its result",
	        .details =
	                "HANDLER is a subscriber, TOPIC/SUBSCRIBER, or a module in the folder of "
	                "handlers.\n"
	                "A database is needed only where the handler asks one; what it writes "
	                "stays.\n"
	                "Prints what the handler returns as JSON, null when that is nothing; its "
	                "log goes\n"
	                "to standard error. ctx:publish and tidemill.publish publish nothing. A "
	                "handler\n"
	                "that fails, retries, snoozes or discards ends this with 1.\n",
	        .min_operands = 1,
	        .max_operands = 2,
	        .run = mill_cli_call,
	},
	{
	        .name = "test",
	        .synopsis = "[SPEC… or option of busted…]",
	        .summary = "Run the app's specs with busted",
	        .details =
	                "Those in the folder spec, or the files and folders named. They find "
	                "`tidemill.testing`\n"
	                "and the handlers; no database is needed. busted must be installed. What "
	                "follows `test`\n"
	                "is busted's: `tidemill test --filter=hello`. With -c, which stands "
	                "before, the folder\n"
	                "of that config is gone to first.\n",
	        .max_operands = MILL_OPERANDS_ANY,
	        .words = true,
	        .run = mill_cli_test,
	},
	{
	        .name = "annotations",
	        .synopsis = "[DIR]",
	        .summary = "Write what the Lua language server needs to know",
	        .details = "Into DIR, or .luals in the current folder, where what is there of an "
	                   "older version is\n"
	                   "replaced. `tidemill init` does the same, and names the folder in "
	                   ".luarc.json.\n",
	        .max_operands = 1,
	        .run = mill_cli_annotations,
	},
	{
	        .name = "drain",
	        .synopsis = "[--topic TOPIC[/SUBSCRIBER]]",
	        .summary = "Run the worker until nothing is waiting",
	        .details =
	                "For tests and cron. Messages due later are not waited for. Handlers that "
	                "fail do not\n"
	                "make this fail; a database that cannot be reached does, and so does a "
	                "signal.\n",
	        .options = drain_options,
	        .silent = true,
	        .run = mill_cli_drain,
	},
	{
	        .name = "reload",
	        .synopsis = "[--app APP] [--json]",
	        .summary = "Ask the workers to load config and handlers anew",
	        .details = "All that are alive and listen, wherever they run; each reads its own "
	                   "disk, as after a\n"
	                   "SIGHUP. New handlers take over when they have loaded; where they do "
	                   "not load, the old\n"
	                   "ones go on. Ends with 1 when there is nobody to ask.\n",
	        .options = reload_options,
	        .run = mill_cli_reload,
	},
	{
	        .name = "status",
	        .synopsis = "[--watch] [--json]",
	        .summary = "Show lanes and workers",
	        .details =
	                "A lane is a subscription. First those that no worker alive serves, then "
	                "those that\n"
	                "wait longest. `due since`: for how long the first message that waits has "
	                "been due.\n"
	                "Counts every unfinished and failed message: with millions it takes "
	                "seconds.\n",
	        .options = status_options,
	        .run = mill_cli_status,
	},
	{
	        .name = "failed list",
	        .synopsis = "[--topic TOPIC] [--limit N] [--json]",
	        .summary = "List messages that are out of attempts",
	        .options = failed_list_options,
	        .run = mill_cli_failed_list,
	},
	{
	        .name = "failed show",
	        .synopsis = "ID [--json]",
	        .summary = "Show all of a message: payload, error, past errors",
	        .details = "Any message, failed or not.\n",
	        .options = json_options,
	        .min_operands = 1,
	        .max_operands = 1,
	        .run = mill_cli_failed_show,
	},
	{
	        .name = "failed retry",
	        .synopsis = "ID… | --topic TOPIC | --all",
	        .summary = "Give failed messages a new life",
	        .details = "Due now, with no attempts spent; past errors are kept. With --topic or "
	                   "--all: those\n"
	                   "that had failed when this began, the oldest first, 100 at a time. Ends "
	                   "with 1 when a\n"
	                   "message is left as it was.\n",
	        .options = failed_retry_options,
	        .max_operands = MILL_OPERANDS_ANY,
	        .run = mill_cli_failed_retry,
	},
	{
	        .name = "failed discard",
	        .synopsis = "ID… | --topic TOPIC | --all [--why TEXT]",
	        .summary = "Declare that failed messages need no more work",
	        .details = "They are deleted in time, as done ones are. Ends with 1 when a message "
	                   "is left as it\n"
	                   "was.\n",
	        .options = failed_discard_options,
	        .max_operands = MILL_OPERANDS_ANY,
	        .run = mill_cli_failed_discard,
	},
	{
	        .name = "cancel",
	        .synopsis = "ID… | --dedupe-key KEY [--topic TOPIC]",
	        .summary = "Discard messages that wait or run",
	        .details = "A handler that runs is told to stop, and nothing it still does counts. "
	                   "Ends with 1\n"
	                   "when a message is left as it was.\n",
	        .options = cancel_options,
	        .max_operands = MILL_OPERANDS_ANY,
	        .run = mill_cli_cancel,
	},
	{
	        .name = "reschedule",
	        .synopsis = "ID… --at TIME",
	        .summary = "Change when waiting messages are due",
	        .details = "Ends with 1 when a message is left as it was.\n",
	        .options = reschedule_options,
	        .min_operands = 1,
	        .max_operands = MILL_OPERANDS_ANY,
	        .run = mill_cli_reschedule,
	},
	{
	        .name = "reclaim",
	        .synopsis = "[--json]",
	        .summary = "Take back what dead workers hold, now",
	        .details = "Workers do it by themselves; this is for when none runs.\n",
	        .options = json_options,
	        .run = mill_cli_reclaim,
	},
	{
	        .name = "prune",
	        .synopsis = "[--json]",
	        .summary = "Delete finished messages past their retention, now",
	        .details =
	                "Workers do it by themselves; this is for when none runs. Failed messages "
	                "stay.\n",
	        .options = json_options,
	        .run = mill_cli_prune,
	},
	{
	        .name = "version",
	        .synopsis = "",
	        .summary = "Print the versions of the program, its libraries and the server",
	        .run = mill_cli_version,
	},
	{
	        .name = "help",
	        .synopsis = "[COMMAND]",
	        .summary = "Say how a command is used",
	        .max_operands = 2,
	        .run = mill_cli_help,
	},
	{
	        .name = "executor",
	        .synopsis = "[PARENT]",
	        .summary = "Run handlers for the runtime that started this",
	        .details = "Started by the program itself, with its end of a socket pair as "
	                   "descriptor 3.\n",
	        .max_operands = 1,
	        .hidden = true,
	        .silent = true,
	        .run = mill_cli_executor,
	},
	{
	        .name = "keys",
	        .synopsis = "",
	        .summary = "Print the table of configuration keys",
	        .details = "One key a line, fields separated by tabs, for script/check-docs.\n",
	        .hidden = true,
	        .run = mill_cli_keys,
	},
	{
	        .name = "statements",
	        .synopsis = "",
	        .summary = "Print the SQL of the runtime",
	        .details = "One statement a line: its name, a tab, and its text with line ends "
	                   "escaped. The names\n"
	                   "in it are those of the config.\n",
	        .hidden = true,
	        .run = mill_cli_statements,
	},
	{ 0 },
};
