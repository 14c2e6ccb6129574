/*
 * Undo: claims whose answer was lost with their connection. What they took is held in our name and
 * nobody works on it, so it is given back. Runtime process; part of claim.
 */
#pragma once

#include "pg/store.h"

struct mill_undo;

/* `on_undone` is told when messages went back. */
struct mill_undo *mill_undo_new(struct mill_store *store, struct mill_link *work,
                                void (*on_undone)(void *context), void *context);
/* Only when nothing is in flight. */
void mill_undo_free(struct mill_undo *undo);

/* The answer to claim `number` was lost, which asked for `wants`; they are copied. */
void mill_undo_add(struct mill_undo *undo, uint64_t number, const struct mill_store_want *wants,
                   size_t want_count);
/* Send what is due; only while the link is up. */
void mill_undo_turn(struct mill_undo *undo, uint64_t now);
/* Each has been undone once, and none is in flight. */
bool mill_undo_is_settled(const struct mill_undo *undo);
size_t mill_undo_in_flight(const struct mill_undo *undo);
/* Forget those of an old worker id: they are nobody's any more. */
void mill_undo_forget(struct mill_undo *undo);
