/* Which libpq the program runs with. */
#pragma once

/* Such as 150020 for 15.20. */
int mill_pg_client_version(void);
