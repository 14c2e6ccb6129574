/* A session as a Lua object: see connection.h. */
#include "executor/connection.h"

#include <lauxlib.h>

#include "executor/sql_value.h"
#include "pg/session.h"

#define CONNECTION "tidemill.connection"

struct connection {
	struct mill_session *session; /* NULL: closed */
	bool lost;
	struct mill_answer answer; /* freed with the object where making values of it raises */
};

static struct connection *check(lua_State *L)
{
	return luaL_checkudata(L, 1, CONNECTION);
}

/* A failure of our own. */
static int refuse(lua_State *L, const char *message)
{
	lua_pushnil(L);
	lua_newtable(L);
	lua_pushstring(L, message);
	lua_setfield(L, -2, "message");
	return 2;
}

static int l_ask(lua_State *L)
{
	struct connection *connection = check(L);
	struct mill_answer *answer = &connection->answer;
	struct mill_span sql, arguments;
	sql.data = luaL_checklstring(L, 2, &sql.len);
	arguments.data = luaL_checklstring(L, 3, &arguments.len);
	bool commits = lua_toboolean(L, 4);
	if (connection->session == NULL)
		return refuse(L, "this connection is closed");
	mill_answer_clear(answer);
	mill_session_ask(connection->session, sql, arguments, answer);
	if (answer->failed && answer->failure.lost) {
		connection->lost = true;
		if (commits)
			mill_answer_unknown(answer);
	}
	int count = mill_sql_push_answer(L, answer);
	if (count == 1) {
		lua_pushstring(L, answer->tag);
		count = 2;
	}
	mill_answer_clear(answer);
	return count;
}

static int l_in_transaction(lua_State *L)
{
	const struct connection *connection = check(L);
	lua_pushboolean(L, connection->session != NULL && !connection->lost &&
	                           mill_session_in_transaction(connection->session));
	return 1;
}

static int l_is_lost(lua_State *L)
{
	lua_pushboolean(L, check(L)->lost);
	return 1;
}

static int l_close(lua_State *L)
{
	struct connection *connection = check(L);
	mill_session_close(connection->session);
	mill_answer_clear(&connection->answer);
	connection->session = NULL;
	return 0;
}

static void push_metatable(lua_State *L)
{
	static const luaL_Reg methods[] = {
		{ "ask", l_ask },         { "in_transaction", l_in_transaction },
		{ "is_lost", l_is_lost }, { "close", l_close },
		{ NULL, NULL },
	};
	if (luaL_newmetatable(L, CONNECTION)) {
		lua_pushcfunction(L, l_close);
		lua_setfield(L, -2, "__gc");
		lua_newtable(L);
		luaL_register(L, NULL, methods);
		lua_setfield(L, -2, "__index");
	}
}

int mill_connection_open(lua_State *L)
{
	const char *dsn = luaL_optstring(L, 1, NULL), *application = luaL_checkstring(L, 2);
	struct connection *connection = lua_newuserdata(L, sizeof(*connection));
	*connection = (struct connection){ 0 };
	push_metatable(L);
	lua_setmetatable(L, -2);
	struct mill_err err = MILL_ERR_INIT;
	if (mill_session_open(dsn, application, &connection->session, &err) != 0) {
		connection->session = NULL;
		lua_pushnil(L);
		lua_newtable(L);
		lua_pushstring(L, err.message);
		lua_setfield(L, -2, "message");
		if (err.sqlstate[0] != '\0') {
			lua_pushstring(L, err.sqlstate);
			lua_setfield(L, -2, "sqlstate");
		}
		return 2;
	}
	return 1;
}
