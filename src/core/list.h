/*
 * An intrusive doubly linked list: the link lives in the element, so moving one between lists
 * allocates nothing and cannot fail. An element is on at most one list; its list is its state.
 *
 * Both processes.
 */
#pragma once

#include "core/base.h"

struct mill_link_node {
	struct mill_link_node *prev, *next; /* both NULL: on no list */
};

struct mill_list {
	struct mill_link_node head; /* next is the first element, prev the last */
	size_t len;
};

static inline void mill_list_init(struct mill_list *list)
{
	list->head.prev = list->head.next = &list->head;
	list->len = 0;
}

static inline bool mill_list_empty(const struct mill_list *list)
{
	return list->len == 0;
}

static inline void mill_list_push(struct mill_list *list, struct mill_link_node *node)
{
	MILL_ASSERT(node->next == NULL && node->prev == NULL);
	node->prev = list->head.prev;
	node->next = &list->head;
	node->prev->next = node;
	list->head.prev = node;
	list->len++;
}

static inline void mill_list_push_front(struct mill_list *list, struct mill_link_node *node)
{
	MILL_ASSERT(node->next == NULL && node->prev == NULL);
	node->next = list->head.next;
	node->prev = &list->head;
	node->next->prev = node;
	list->head.next = node;
	list->len++;
}

static inline void mill_list_remove(struct mill_list *list, struct mill_link_node *node)
{
	MILL_ASSERT(node->next != NULL && list->len > 0);
	node->prev->next = node->next;
	node->next->prev = node->prev;
	node->prev = node->next = NULL;
	list->len--;
}

static inline struct mill_link_node *mill_list_first(const struct mill_list *list)
{
	return list->len ? list->head.next : NULL;
}

/* Take the first element off; NULL when there is none. */
static inline struct mill_link_node *mill_list_shift(struct mill_list *list)
{
	struct mill_link_node *node = mill_list_first(list);
	if (node != NULL)
		mill_list_remove(list, node);
	return node;
}

/* Move all of `from` behind the last of `to`. */
static inline void mill_list_append(struct mill_list *to, struct mill_list *from)
{
	if (from->len == 0)
		return;
	from->head.next->prev = to->head.prev;
	to->head.prev->next = from->head.next;
	from->head.prev->next = &to->head;
	to->head.prev = from->head.prev;
	to->len += from->len;
	mill_list_init(from);
}

/* Walk a list; the current node may be removed inside the loop. */
#define mill_list_each(node, list)                                                                 \
	for (struct mill_link_node *node = (list)->head.next, *node##_next = node->next;           \
	     node != &(list)->head; node = node##_next, node##_next = node->next)
