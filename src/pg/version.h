/*
 * Which libpq the program runs with. Apart from connections, since `tidemill version` opens none
 * for it. Knows nothing else. Runtime process.
 */
#pragma once

/* Such as 150020 for 15.20. */
int mill_pg_client_version(void);
