/* Publishes of handlers: see relay.h. */
#include "flow/relay.h"

struct entry {
	struct mill_link_node node; /* in waiting or sent */
	struct mill_relay *relay;
	struct mill_executor *executor; /* NULL: gone */
	uint64_t request;
	char *body, *published_by;
	size_t body_len;
	char message_id[37];      /* of the delivery that asks; empty: not known */
	char *topic, *subscriber; /* its lane */
};

struct mill_relay {
	struct mill_store *store;
	struct mill_link *publish;
	struct mill_orphans *orphans;
	struct mill_list waiting, sent;
};

struct mill_relay *mill_relay_new(struct mill_store *store, struct mill_link *publish,
                                  struct mill_orphans *orphans)
{
	struct mill_relay *relay = mill_calloc(1, sizeof(*relay));
	relay->store = store;
	relay->publish = publish;
	relay->orphans = orphans;
	mill_list_init(&relay->waiting);
	mill_list_init(&relay->sent);
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

void mill_relay_free(struct mill_relay *relay)
{
	MILL_ASSERT(mill_list_empty(&relay->sent));
	struct mill_link_node *node;
	while ((node = mill_list_shift(&relay->waiting)) != NULL)
		entry_free(entry_at(node));
	free(relay);
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

static void on_published(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct entry *entry = context;
	mill_list_remove(&entry->relay->sent, &entry->node);
	struct mill_reply reply = { .request = entry->request, .ok = err == NULL };
	if (err == NULL) {
		reply.body = mill_store_published(results);
		mill_orphans_tell(entry->relay->orphans, mill_store_unwanted(results),
		                  entry->message_id[0] ? entry->message_id : NULL, entry->topic,
		                  entry->subscriber);
	} else {
		reply.body = MILL_SPAN(err->message);
	}
	if (entry->executor != NULL)
		mill_reply_write(mill_executor_out(entry->executor), &reply);
	entry_free(entry);
}

void mill_relay_turn(struct mill_relay *relay)
{
	if (!mill_link_is_up(relay->publish))
		return;
	struct mill_link_node *node;
	while ((node = mill_list_shift(&relay->waiting)) != NULL) {
		struct entry *entry = entry_at(node);
		mill_list_push(&relay->sent, node);
		struct mill_span by =
		        entry->published_by ? MILL_SPAN(entry->published_by) : MILL_SPAN_NONE;
		mill_store_publish(relay->store, relay->publish,
		                   (struct mill_span){ entry->body, entry->body_len }, by,
		                   on_published, entry);
	}
}

void mill_relay_forget(struct mill_relay *relay, const struct mill_executor *executor)
{
	struct mill_list *lists[] = { &relay->waiting, &relay->sent };
	for (size_t i = 0; i < MILL_COUNT(lists); i++)
		mill_list_each(node, lists[i]) if (entry_at(node)->executor == executor)
		        entry_at(node)
		                ->executor = NULL;
}
