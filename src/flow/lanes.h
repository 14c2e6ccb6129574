/*
 * Lanes: the subscriptions this runtime serves, from one reload to the next.
 *
 * A lane is known by its topic and subscriber. One that a reload keeps is the same lane as before,
 * with new options: its deliveries under way count against its limit whichever generation runs
 * them. One that a reload takes away stays until the last of its deliveries is settled. Runtime
 * process.
 */
#pragma once

#include "core/delivery.h"

struct mill_lanes;

struct mill_lanes *mill_lanes_new(void);
void mill_lanes_free(struct mill_lanes *lanes);

/*
 * From now on these are the manifest's lanes; `numbers` are the ledger's, in its order. `only`, as
 * TOPIC or TOPIC/SUBSCRIBER, names those that are served here; NULL: all.
 */
void mill_lanes_declare(struct mill_lanes *lanes, const struct mill_manifest *manifest,
                        const int32_t *numbers, const char *only);
/* The ledger's numbers of the same lanes have changed. */
void mill_lanes_renumber(struct mill_lanes *lanes, const int32_t *numbers);

/* Those declared, by their place in the manifest. A lane stays where it is in memory. */
size_t mill_lanes_count(const struct mill_lanes *lanes);
struct mill_lane *mill_lanes_at(const struct mill_lanes *lanes, size_t i);

/* Free those taken away that nobody uses any more; cheap where there are none. */
void mill_lanes_tidy(struct mill_lanes *lanes);

/* Does `only` name a lane of this manifest? −1 and an error when not. NULL names all. */
int mill_lanes_check_only(const struct mill_manifest *manifest, const char *only,
                          struct mill_err *err);
