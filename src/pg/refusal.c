/* Faults in rows made into errors: see refusal.h. */
#include "pg/refusal.h"

struct asker {
	mill_link_done done;
	void *context;
};

/*
 * What cannot be read as JSON, holds what jsonb cannot, or is nested too deeply. Nothing but the
 * JSON and times is cast from text in these statements, and times fail otherwise.
 */
static bool is_misread_json(const struct mill_err *err)
{
	static const char *const states[] = { "22P02", "22P05", "22003", "54" };
	for (size_t i = 0; i < MILL_COUNT(states); i++)
		if (strncmp(err->sqlstate, states[i], strlen(states[i])) == 0)
			return true;
	return false;
}

static void on_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct asker asker = *(struct asker *)context;
	free(context);
	struct mill_err refusal;
	if (err != NULL) {
		refusal = *err;
		if (is_misread_json(err))
			mill_err_wrap(&refusal, "not JSON");
		asker.done(NULL, &refusal, asker.context);
		return;
	}
	const struct mill_rowset *rows = mill_results_at(results, 1);
	if (mill_rowset_count(rows) > 0) {
		struct mill_span fault = mill_rowset_span(rows, 0, MILL_REFUSAL_FAULT);
		if (fault.data != NULL) {
			mill_err_database(&refusal, "22023", "%.*s", (int)fault.len, fault.data);
			asker.done(NULL, &refusal, asker.context);
			return;
		}
	}
	asker.done(results, NULL, asker.context);
}

void mill_refusal_end(struct mill_link *link, mill_link_done done, void *context)
{
	struct asker *asker = mill_alloc(sizeof(*asker));
	*asker = (struct asker){ done, context };
	mill_link_end(link, on_answer, asker);
}
