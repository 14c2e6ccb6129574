/*
 * `tidemill annotations [DIR]`: what the Lua language server knows of Tidemill, as files, so that
 * an editor completes and checks config.lua and handlers.
 */
#include <stdio.h>

#include "cli/cli.h"
#include "core/embedded.h"

int mill_cli_write_annotations(const char *folder, struct mill_err *err)
{
	int result = 0;
	for (size_t i = 0; result == 0 && i < mill_embedded_annotations_count; i++) {
		const struct mill_embedded *file = &mill_embedded_annotations[i];
		char *path = mill_cli_in_folder(folder, file->name);
		result = mill_cli_make_folders(path, err);
		if (result == 0)
			result = mill_cli_write_file(path, (const char *)file->data, true, err);
		free(path);
	}
	if (result == 0)
		printf("wrote %s/, for editors: annotations for the Lua language server\n", folder);
	return result;
}

int mill_cli_annotations(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	const char *folder = cli->operand_count > 0 ? cli->operands[0] : MILL_CLI_ANNOTATIONS;
	if (folder[0] == 0)
		mill_err_set(&err, MILL_ERR_USAGE, "the name of the folder is empty");
	else if (mill_cli_write_annotations(folder, &err) == 0)
		return MILL_EXIT_OK;
	return mill_cli_fail(&err);
}
