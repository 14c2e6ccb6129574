/*
 * Publishes of handlers: see relay.h.
 *
 *     waiting ──► sent ──► answered, freed
 *                  │  ▲
 *                  ▼  │ one at a time
 *                 blocked
 *
 * All share one connection, so none may wait in it for a stranger's transaction, which holds the
 * same dedupe key: the statement gives up almost at once, and is tried again behind the others.
 */
#include "flow/relay.h"

#include <stdio.h>

#include "core/clock.h"

#define RETRY_PAUSE_NS 50000000u
#define BLOCKED_MOST_SECS 5

struct entry {
	struct mill_link_node node; /* in waiting, sent or blocked */
	struct mill_relay *relay;
	struct mill_executor *executor; /* NULL: gone */
	uint64_t request;
	char *body, *published_by;
	size_t body_len;
	char message_id[37];      /* of the delivery that asks; empty: not known */
	char *topic, *subscriber; /* its lane */
	uint64_t blocked_ns;      /* since when; 0: not blocked so far */
};

struct mill_relay {
	struct mill_store *store;
	struct mill_link *publish;
	struct mill_orphans *orphans;
	struct mill_list waiting, sent;
	struct mill_list blocked;
	bool retrying;     /* one of those that were blocked is in flight */
	uint64_t retry_ns; /* the next one not before then */
	uv_timer_t wake;   /* the loop turns, and mill_relay_turn sends */
	void (*on_closed)(void *context);
	void *closed_context;
};

struct mill_relay *mill_relay_new(uv_loop_t *loop, struct mill_store *store,
                                  struct mill_link *publish, struct mill_orphans *orphans)
{
	struct mill_relay *relay = mill_calloc(1, sizeof(*relay));
	relay->store = store;
	relay->publish = publish;
	relay->orphans = orphans;
	mill_list_init(&relay->waiting);
	mill_list_init(&relay->sent);
	mill_list_init(&relay->blocked);
	MILL_ASSERT(uv_timer_init(loop, &relay->wake) == 0);
	return relay;
}

static struct entry *entry_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct entry, node);
}

static void entry_free(struct entry *entry)
{
	free(entry->body);
	free(entry->published_by);
	free(entry->topic);
	free(entry->subscriber);
	free(entry);
}

static void on_wake_closed(uv_handle_t *handle)
{
	struct mill_relay *relay = mill_container_of(handle, struct mill_relay, wake);
	void (*on_closed)(void *) = relay->on_closed;
	void *context = relay->closed_context;
	free(relay);
	on_closed(context);
}

void mill_relay_close(struct mill_relay *relay, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(mill_list_empty(&relay->sent));
	struct mill_link_node *node;
	mill_list_append(&relay->waiting, &relay->blocked);
	while ((node = mill_list_shift(&relay->waiting)) != NULL)
		entry_free(entry_at(node));
	relay->on_closed = on_closed;
	relay->closed_context = context;
	uv_close((uv_handle_t *)&relay->wake, on_wake_closed);
}

void mill_relay_take(struct mill_relay *relay, struct mill_executor *executor,
                     const struct mill_request *request, const struct mill_delivery *delivery)
{
	struct entry *entry = mill_calloc(1, sizeof(*entry));
	entry->relay = relay;
	entry->executor = executor;
	entry->request = request->request;
	entry->body_len = request->body.data ? request->body.len : 0;
	entry->body = mill_strndup(request->body.data ? request->body.data : "", entry->body_len);
	entry->published_by = mill_span_dup(request->published_by);
	if (delivery != NULL) {
		mill_delivery_id_text(delivery, entry->message_id);
		entry->topic = mill_strdup(delivery->lane->spec->topic);
		entry->subscriber = mill_strdup(delivery->lane->spec->subscriber);
	}
	mill_list_push(&relay->waiting, &entry->node);
}

static void on_wake(uv_timer_t *timer)
{
	(void)timer; /* turning the loop is the purpose */
}

/* What was published was not, because of a lock: true when it will be tried again. */
static bool put_off(struct entry *entry)
{
	struct mill_relay *relay = entry->relay;
	uint64_t now = mill_clock_ns();
	if (entry->blocked_ns == 0)
		entry->blocked_ns = now;
	if (now - entry->blocked_ns >= BLOCKED_MOST_SECS * UINT64_C(1000000000))
		return false;
	mill_list_push(&relay->blocked, &entry->node);
	if (relay->retry_ns < now)
		relay->retry_ns = now + RETRY_PAUSE_NS;
	return true;
}

static void on_published(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct entry *entry = context;
	struct mill_relay *relay = entry->relay;
	mill_list_remove(&relay->sent, &entry->node);
	if (entry->blocked_ns != 0)
		relay->retrying = false;
	if (err != NULL && mill_err_is_lock_timeout(err) && put_off(entry))
		return;
	char blocked[160];
	struct mill_reply reply = { .request = entry->request, .ok = err == NULL };
	if (err == NULL) {
		reply.body = mill_store_published(results);
		mill_orphans_tell(entry->relay->orphans, mill_store_unwanted(results),
		                  entry->message_id[0] ? entry->message_id : NULL, entry->topic,
		                  entry->subscriber);
	} else {
		snprintf(blocked, sizeof(blocked),
		         "another transaction, still open after %d s, publishes the same dedupe "
		         "key or has locked the table: try again",
		         BLOCKED_MOST_SECS);
		reply.body = MILL_SPAN(mill_err_is_lock_timeout(err) ? blocked : err->message);
	}
	if (entry->executor != NULL)
		mill_reply_write(mill_executor_out(entry->executor), &reply);
	entry_free(entry);
}

static void send_first(struct mill_relay *relay, struct mill_list *from)
{
	struct mill_link_node *node = mill_list_shift(from);
	struct entry *entry = entry_at(node);
	mill_list_push(&relay->sent, node);
	struct mill_span by = entry->published_by ? MILL_SPAN(entry->published_by) : MILL_SPAN_NONE;
	mill_store_publish(relay->store, relay->publish,
	                   (struct mill_span){ entry->body, entry->body_len }, by, on_published,
	                   entry);
}

void mill_relay_turn(struct mill_relay *relay)
{
	if (!mill_link_is_up(relay->publish))
		return;
	while (!mill_list_empty(&relay->waiting))
		send_first(relay, &relay->waiting);
	if (mill_list_empty(&relay->blocked) || relay->retrying)
		return;
	uint64_t now = mill_clock_ns();
	if (now >= relay->retry_ns) {
		relay->retrying = true;
		send_first(relay, &relay->blocked);
	} else if (!uv_is_active((uv_handle_t *)&relay->wake)) {
		uv_timer_start(&relay->wake, on_wake, (relay->retry_ns - now) / 1000000 + 1, 0);
	}
}

void mill_relay_forget(struct mill_relay *relay, const struct mill_executor *executor)
{
	struct mill_list *lists[] = { &relay->waiting, &relay->sent, &relay->blocked };
	for (size_t i = 0; i < MILL_COUNT(lists); i++)
		mill_list_each(node, lists[i]) if (entry_at(node)->executor == executor)
		        entry_at(node)
		                ->executor = NULL;
}
