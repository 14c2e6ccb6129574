/* `tidemill reclaim` and `tidemill prune`: what workers do by themselves, once and by hand. */
#include "pg/housekeeping.h"

#include <stdio.h>

#include "cli/cli.h"

struct pass {
	bool prune;
	struct mill_progress progress;
};

static bool on_progress(const struct mill_housekeeping_counts *counts, void *context)
{
	struct pass *pass = context;
	if (pass->prune)
		mill_progress_show(&pass->progress, "%lld pruned…", (long long)counts->pruned);
	else
		mill_progress_show(&pass->progress, "%lld reclaimed…",
		                   (long long)(counts->returned + counts->failed));
	return !mill_cli_interrupted();
}

static const char *plural(int64_t count)
{
	return count == 1 ? "" : "s";
}

static void print_reclaimed(const struct mill_housekeeping_counts *counts, bool json)
{
	long long returned = counts->returned, failed = counts->failed, workers = counts->workers;
	if (json)
		printf("{\"returned\":%lld,\"failed\":%lld,\"workers\":%lld}\n", returned, failed,
		       workers);
	else
		printf("%lld message%s pending again, %lld out of attempts and failed; %lld dead "
		       "worker%s removed\n",
		       returned, plural(returned), failed, workers, plural(workers));
}

static void print_pruned(const struct mill_housekeeping_counts *counts, bool json)
{
	long long pruned = counts->pruned;
	if (json)
		printf("{\"pruned\":%lld}\n", pruned);
	else
		printf("%lld finished message%s deleted\n", pruned, plural(pruned));
}

static int run_pass(struct mill_cli *cli, bool prune)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_cli_database database;
	if (mill_cli_open_database(cli, &database, &err) != 0)
		return mill_cli_fail(&err);
	const struct mill_settings *settings = &database.manifest.settings;
	struct mill_housekeeping queue = { database.session, settings->schema, settings->table,
		                           settings->prefix };
	struct mill_housekeeping_counts counts;
	struct pass pass = { .prune = prune };
	mill_cli_note_interrupts();
	int result = prune ? mill_housekeeping_prune(&queue, on_progress, &pass, &counts, &err)
	                   : mill_housekeeping_reclaim(&queue, settings->lease_secs, on_progress,
	                                               &pass, &counts, &err);
	mill_progress_end(&pass.progress);
	if (result != 0)
		mill_cli_explain(&database, &err);
	else if (mill_cli_interrupted())
		result =
		        mill_err_set(&err, MILL_ERR_SYSTEM, "interrupted: there may be more to do");
	if (prune)
		mill_cli_did(cli, "%lld message%s deleted", (long long)counts.pruned,
		             counts.pruned == 1 ? " was" : "s were");
	else
		mill_cli_did(cli, "%lld message%s reclaimed",
		             (long long)(counts.returned + counts.failed),
		             counts.returned + counts.failed == 1 ? " was" : "s were");
	bool json = mill_cli_value(cli, "json") != NULL;
	if (prune && (result == 0 || counts.pruned > 0))
		print_pruned(&counts, json);
	else if (!prune && (result == 0 || counts.returned + counts.failed + counts.workers > 0))
		print_reclaimed(&counts, json);
	int code = result == 0 ? MILL_EXIT_OK : mill_cli_fail(&err);
	mill_cli_free_database(&database);
	return code;
}

int mill_cli_reclaim(struct mill_cli *cli)
{
	return run_pass(cli, false);
}

int mill_cli_prune(struct mill_cli *cli)
{
	return run_pass(cli, true);
}
