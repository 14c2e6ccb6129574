/*
 * The lanes of a table that knows none: the pairs of topic and subscriber that the app subscribes
 * to, under numbers of our own.
 *
 * In a plain table (queries.h) nothing but the configuration says who subscribes to what. The store
 * keeps that here, and hands it to each statement that needs it. Runtime process; knows no
 * statement.
 */
#pragma once

#include "core/config.h"
#include "pg/params.h"

struct mill_pairs;

struct mill_pairs *mill_pairs_new(void);
/* NULL is fine. */
void mill_pairs_free(struct mill_pairs *pairs);

/*
 * The app subscribes to the manifest's lanes now, and to nothing else. A pair keeps its number as
 * long as `pairs` lives, declared or not: messages that were claimed under it may still be around.
 */
void mill_pairs_declare(struct mill_pairs *pairs, const struct mill_manifest *manifest);

/* The number of a pair that was declared, now or earlier; numbers begin with 1. */
int32_t mill_pairs_number(const struct mill_pairs *pairs, const char *topic,
                          const char *subscriber);

/* Two arrays of text: the topics and the subscribers of these numbers. */
void mill_pairs_params_of(const struct mill_pairs *pairs, struct mill_params *params,
                          const int32_t *numbers, size_t count);
/* The same for all that are declared now. */
void mill_pairs_params(const struct mill_pairs *pairs, struct mill_params *params);
/* Two arrays of int4 in the same order: their max_attempts and retain_hours. */
void mill_pairs_option_params(const struct mill_pairs *pairs, struct mill_params *params);
