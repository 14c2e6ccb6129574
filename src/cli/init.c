/*
 * `tidemill init [DIR]`: the beginning of an app, the files of template/, which work as they are.
 *
 * Writes new files only. Needs neither a config nor a database.
 */
#include <stdio.h>
#include <sys/stat.h>

#include "cli/cli.h"
#include "core/embedded.h"

#define TOPIC "greeting.wanted" /* as template/config.lua has it */
#define APP_MARK "@app@"        /* stands for the app's name in template/ */
#define APP_MAX 100             /* bytes, as the key `app` has it */

/* The folder's own name with what an app's name should not have taken out. */
static char *app_name(const char *folder)
{
	static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	                            "_-.";
	char *path = realpath(folder, NULL);
	const char *slash = path ? strrchr(path, '/') : NULL;
	const char *own = slash ? slash + 1 : "";
	char *name = mill_strndup(own, strnlen(own, APP_MAX));
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

/* Settings of an editor, which a folder may have already. */
static bool is_optional(const struct mill_embedded *file)
{
	return file->name[0] == '.';
}

/* Nothing is written where one of the others is there. */
static int refuse_existing(const char *folder, struct mill_err *err)
{
	char *list = mill_strdup("");
	size_t found = 0;
	for (size_t i = 0; i < mill_embedded_template_count; i++) {
		char *path = mill_cli_in_folder(folder, mill_embedded_template[i].name);
		if (!is_optional(&mill_embedded_template[i]) && is_there(path)) {
			char *longer = mill_sprintf("%s%s%s", list, found ? " and " : "", path);
			free(list);
			list = longer;
			found++;
		}
		free(path);
	}
	if (found > 0)
		mill_err_set(err, MILL_ERR_USAGE,
		             "%s %s there already, and nothing was written: take another folder, "
		             "or move %s away",
		             list, found > 1 ? "are" : "is", found > 1 ? "them" : "it");
	free(list);
	return found > 0 ? -1 : 0;
}

/* A file of the template in its place, the app's name put in. */
static int write_template(const struct mill_embedded *file, const char *folder, const char *app,
                          struct mill_err *err)
{
	const char *text = (const char *)file->data, *mark = strstr(text, APP_MARK);
	char *path = mill_cli_in_folder(folder, file->name);
	if (is_optional(file) && is_there(path)) {
		printf("kept  %s\n", path);
		free(path);
		return 0;
	}
	char *named = mark ? mill_sprintf("%.*s%s%s", (int)(mark - text), text, app,
	                                  mark + strlen(APP_MARK))
	                   : mill_strdup(text);
	int result = mill_cli_make_folders(path, err);
	if (result == 0)
		result = mill_cli_write_file(path, named, false, err);
	if (result == 0)
		printf("wrote %s\n", path);
	free(named);
	free(path);
	return result;
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
	printf("  %s test   # runs spec/, with no database; needs busted (apt-get install "
	       "lua-busted)\n"
	       "  %s dev    # runs it, with a Postgres of its own, until Ctrl-C\n"
	       "and in another terminal, in the same folder:\n"
	       "  %s publish " TOPIC " '{\"name\": \"Ann\"}'\n",
	       program, program, program);
	free(program);
	free(word);
}

static int write_templates(const char *folder, struct mill_err *err)
{
	char *below = mill_cli_in_folder(folder, "");
	int result = refuse_existing(folder, err);
	/* The folder has a path, and so a name, once it is there. */
	if (result == 0 && mill_cli_make_folders(below, err) != 0)
		result = -1;
	free(below);
	char *app = app_name(folder);
	for (size_t i = 0; result == 0 && i < mill_embedded_template_count; i++)
		result = write_template(&mill_embedded_template[i], folder, app, err);
	free(app);
	char *annotations = mill_cli_in_folder(folder, MILL_CLI_ANNOTATIONS);
	if (result == 0)
		result = mill_cli_write_annotations(annotations, err);
	free(annotations);
	return result;
}

int mill_cli_init(struct mill_cli *cli)
{
	const char *folder = cli->operand_count > 0 ? cli->operands[0] : ".";
	struct mill_err err = MILL_ERR_INIT;
	if (folder[0] == 0) {
		mill_err_set(&err, MILL_ERR_USAGE, "the name of the folder is empty");
		return mill_cli_fail(&err);
	}
	if (write_templates(folder, &err) != 0)
		return mill_cli_fail(&err);
	mill_cli_did(cli, "the app was written to %s", folder);
	say_what_next(cli, folder);
	return MILL_EXIT_OK;
}
