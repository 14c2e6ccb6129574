/*
 * `tidemill init [DIR]`: the beginning of an app, a config and a handler that work as they are.
 *
 * Writes new files only. Needs neither a config nor a database.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"

#define TOPIC "greeting.wanted"
#define APP_MAX 100 /* bytes, as the key `app` has it */

/* `%s` is the app's name. */
static const char config_text[] =
        "-- What this app is, and which handler gets which topic.\n"
        "-- `tidemill check` says whether all is in order here.\n"
        "\n"
        "return {\n"
        "  app = \"%s\", -- the owner of these subscriptions; apps that share a database differ "
        "in it\n"
        "\n"
        "  -- The database of `tidemill run`. `tidemill dev` starts one of its own where none is "
        "named.\n"
        "  -- database = os.getenv \"DATABASE_URL\",\n"
        "\n"
        "  -- A message is tried this often before it is set aside as failed.\n"
        "  max_attempts = 5,\n"
        "\n"
        "  subscribe = {\n"
        "    -- A topic, and the handlers that get its messages: \"hello\" is handlers/hello.lua.\n"
        "    [\"" TOPIC "\"] = { \"hello\" },\n"
        "  },\n"
        "}\n";

static const char handler_text[] =
        "-- " TOPIC ": says hello.\n"
        "--\n"
        "-- Called with each message of a topic it is subscribed to in config.lua. Returning is "
        "success; an\n"
        "-- error fails the attempt, and the message comes again later. So it may come twice: "
        "ctx.message_id is\n"
        "-- the same each time.\n"
        "\n"
        "return function(payload, ctx)\n"
        "  local name = type(payload) == \"table\" and payload.name or \"world\"\n"
        "  ctx:log(\"hello, \" .. tostring(name))\n"
        "end\n";

static char *in_folder(const char *folder, const char *name)
{
	if (strcmp(folder, ".") == 0)
		return mill_strdup(name);
	const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
	return mill_sprintf("%s%s%s", folder, slash, name);
}

/* The folder and those above it, where they are not there. */
static int make_folder(const char *path, struct mill_err *err)
{
	char *made = mill_strdup(path);
	int result = 0;
	for (char *at = made + (made[0] == '/'); result == 0; at++) {
		if (*at != '/' && *at != 0)
			continue;
		bool whole = *at == 0;
		*at = 0;
		if (mkdir(made, 0777) != 0 && errno != EEXIST)
			result = mill_err_system(err, errno, "cannot make the folder %s", made);
		if (whole)
			break;
		*at = '/';
	}
	free(made);
	return result;
}

static int write_file(const char *path, const char *text, struct mill_err *err)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0)
		return mill_err_system(err, errno, "cannot make %s", path);
	size_t len = strlen(text), done = 0;
	int result = 0;
	while (result == 0 && done < len) {
		ssize_t n = write(fd, text + done, len - done);
		if (n > 0)
			done += (size_t)n;
		else if (errno != EINTR)
			result = mill_err_system(err, errno, "cannot write %s", path);
	}
	if (close(fd) != 0 && result == 0)
		result = mill_err_system(err, errno, "cannot write %s", path);
	if (result == 0)
		printf("wrote %s\n", path);
	return result;
}

/* The folder's own name with what an app's name should not have taken out. */
static char *app_name(const char *folder)
{
	static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	                            "_-.";
	char *path = realpath(folder, NULL);
	const char *slash = path ? strrchr(path, '/') : NULL;
	char *name = mill_strndup(slash ? slash + 1 : "", APP_MAX);
	char *end = name;
	for (const char *at = name; *at; at++)
		if (strchr(plain, *at) != NULL)
			*end++ = *at;
	*end = 0;
	free(path);
	if (name[0] != 0)
		return name;
	free(name);
	return mill_strdup("app");
}

static bool is_there(const char *path)
{
	struct stat found;
	return lstat(path, &found) == 0;
}

/* Nothing is written where one of the files is there. */
static int refuse_existing(const char *config, const char *handler, struct mill_err *err)
{
	bool first = is_there(config), second = is_there(handler);
	if (!first && !second)
		return 0;
	return mill_err_set(
	        err, MILL_ERR_USAGE,
	        "%s%s%s %s there already, and nothing was written: take another folder, or move "
	        "%s away",
	        first ? config : "", first && second ? " and " : "", second ? handler : "",
	        first && second ? "are" : "is", first && second ? "them" : "it");
}

/* The program as it is typed in that folder. */
static char *program_there(const struct mill_cli *cli, bool elsewhere)
{
	bool relative = cli->program[0] != '/' && strchr(cli->program, '/') != NULL;
	char *path = relative && elsewhere ? realpath(cli->program, NULL) : NULL;
	char *word = mill_cli_shell_word(path ? path : cli->program);
	free(path);
	return word;
}

static void say_what_next(const struct mill_cli *cli, const char *folder)
{
	bool elsewhere = strcmp(folder, ".") != 0;
	char *program = program_there(cli, elsewhere), *word = mill_cli_shell_word(folder);
	printf("\nnext:\n");
	if (elsewhere)
		printf("  cd %s\n", word);
	printf("  %s dev    # runs it, with a Postgres of its own, until Ctrl-C\n"
	       "and in another terminal, in the same folder:\n"
	       "  %s publish " TOPIC " '{\"name\": \"Ann\"}'\n",
	       program, program);
	free(program);
	free(word);
}

int mill_cli_init(struct mill_cli *cli)
{
	const char *folder = cli->operand_count > 0 ? cli->operands[0] : ".";
	struct mill_err err = MILL_ERR_INIT;
	if (folder[0] == 0) {
		mill_err_set(&err, MILL_ERR_USAGE, "the name of the folder is empty");
		return mill_cli_fail(&err);
	}
	char *config = in_folder(folder, "config.lua");
	char *handlers = in_folder(folder, "handlers");
	char *handler = in_folder(folder, "handlers/hello.lua");
	int code = MILL_EXIT_OK;
	if (refuse_existing(config, handler, &err) != 0 || make_folder(handlers, &err) != 0) {
		code = mill_cli_fail(&err);
	} else {
		char *app = app_name(folder);
		char *text = mill_sprintf(config_text, app);
		if (write_file(config, text, &err) != 0 ||
		    write_file(handler, handler_text, &err) != 0)
			code = mill_cli_fail(&err);
		else
			say_what_next(cli, folder);
		free(text);
		free(app);
	}
	free(config);
	free(handlers);
	free(handler);
	return code;
}
