/* The record that travels: see delivery.h. */
#include "core/delivery.h"

#include <math.h>

#include "core/policy.h"
#include "core/uuid.h"

#define LONGEST_DELAY_SECS (100.0 * 366 * 86400)

struct mill_delivery *mill_delivery_new(void)
{
	return mill_calloc(1, sizeof(struct mill_delivery));
}

void mill_delivery_free(struct mill_delivery *delivery)
{
	MILL_ASSERT(delivery->node.next == NULL);
	mill_buffer_free(&delivery->frame);
	free(delivery->error);
	free(delivery->publications);
	free(delivery);
}

void mill_delivery_move(struct mill_delivery *delivery, struct mill_list *from,
                        struct mill_list *to, enum mill_delivery_state state)
{
	if (from != NULL)
		mill_list_remove(from, &delivery->node);
	if (to != NULL)
		mill_list_push(to, &delivery->node);
	delivery->state = state;
}

static double bounded_delay(double secs)
{
	if (!(secs > 0)) /* NaN too */
		return 0;
	return fmin(secs, LONGEST_DELAY_SECS);
}

static void fail_or_retry(struct mill_delivery *delivery, double delay_secs)
{
	bool spent = delivery->attempts >= delivery->max_attempts;
	delivery->settlement = spent ? MILL_SETTLE_FAILED : MILL_SETTLE_PENDING;
	delivery->delay_secs = spent ? 0 : delay_secs;
}

void mill_delivery_conclude(struct mill_delivery *delivery, const struct mill_outcome *outcome,
                            double random)
{
	const struct mill_lane_options *options = &delivery->lane->spec->options;
	free(delivery->error);
	free(delivery->publications);
	delivery->error = NULL;
	delivery->publications = NULL;
	delivery->delay_secs = 0;
	delivery->refund = false;
	if (outcome->error.data != NULL)
		delivery->error = mill_policy_clean_text(outcome->error.data, outcome->error.len,
		                                         MILL_ERROR_MAX);
	switch (outcome->kind) {
	case MILL_OUTCOME_DONE:
		delivery->settlement = MILL_SETTLE_DONE;
		delivery->publications = mill_span_dup(outcome->publications);
		break;
	case MILL_OUTCOME_RAISED:
		fail_or_retry(delivery, mill_policy_backoff_secs(
		                                (uint32_t)options->retry_backoff_secs,
		                                delivery->attempts, options->retry_jitter, random));
		break;
	case MILL_OUTCOME_RETRY:
		fail_or_retry(delivery, bounded_delay(outcome->delay_secs));
		break;
	case MILL_OUTCOME_SNOOZE:
		delivery->settlement = MILL_SETTLE_PENDING;
		delivery->delay_secs = bounded_delay(outcome->delay_secs);
		delivery->refund = true;
		break;
	case MILL_OUTCOME_DISCARD:
		delivery->settlement = MILL_SETTLE_DISCARDED;
		break;
	case MILL_OUTCOME_RETURNED:
		delivery->settlement = MILL_SETTLE_PENDING;
		delivery->refund = true;
		break;
	case MILL_OUTCOME_FINISHED:
		delivery->settlement = MILL_SETTLE_DONE;
		delivery->written = true;
		break;
	}
	/* The dead letter and the retry say why, whatever the handler raised. */
	bool silent = delivery->error == NULL || delivery->error[0] == '\0';
	bool wants_reason = outcome->kind == MILL_OUTCOME_RAISED ||
	                    outcome->kind == MILL_OUTCOME_RETRY ||
	                    outcome->kind == MILL_OUTCOME_DISCARD;
	if (silent && wants_reason) {
		free(delivery->error);
		delivery->error = mill_strdup("the handler gave no reason");
	}
}

void mill_delivery_id_text(const struct mill_delivery *delivery, char text[37])
{
	mill_uuid_text(delivery->id, text);
}
