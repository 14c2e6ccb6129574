/* Binary parameters: see params.h. Postgres reads numbers in network order. */
#include "pg/params.h"

#include <endian.h>

void mill_params_free(struct mill_params *params)
{
	mill_buffer_free(&params->bytes);
}

void mill_params_clear(struct mill_params *params)
{
	params->bytes.len = 0;
	params->count = 0;
}

static void begin(struct mill_params *params)
{
	MILL_ASSERT(params->count < MILL_PARAMS_MAX);
	params->offsets[params->count] = params->bytes.len;
}

static void end(struct mill_params *params)
{
	params->lengths[params->count] = (int)(params->bytes.len - params->offsets[params->count]);
	params->count++;
}

static void put_u16(struct mill_params *params, uint16_t value)
{
	value = htobe16(value);
	mill_buffer_bytes(&params->bytes, &value, sizeof(value));
}

static void put_u32(struct mill_params *params, uint32_t value)
{
	value = htobe32(value);
	mill_buffer_bytes(&params->bytes, &value, sizeof(value));
}

static void put_u64(struct mill_params *params, uint64_t value)
{
	value = htobe64(value);
	mill_buffer_bytes(&params->bytes, &value, sizeof(value));
}

static uint64_t float_bits(double value)
{
	uint64_t bits;
	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

void mill_params_bool(struct mill_params *params, bool value)
{
	begin(params);
	mill_write_u8(&params->bytes, value);
	end(params);
}

void mill_params_int4(struct mill_params *params, int32_t value)
{
	begin(params);
	put_u32(params, (uint32_t)value);
	end(params);
}

void mill_params_int8(struct mill_params *params, int64_t value)
{
	begin(params);
	put_u64(params, (uint64_t)value);
	end(params);
}

void mill_params_float8(struct mill_params *params, double value)
{
	begin(params);
	put_u64(params, float_bits(value));
	end(params);
}

void mill_params_text(struct mill_params *params, struct mill_span text)
{
	begin(params);
	mill_buffer_bytes(&params->bytes, text.data, text.len);
	end(params);
	if (text.data == NULL)
		params->lengths[params->count - 1] = -1;
}

void mill_params_uuid(struct mill_params *params, const uint8_t id[16])
{
	begin(params);
	mill_buffer_bytes(&params->bytes, id, 16);
	end(params);
}

/* Layout: dimensions, has-null flag, element type, then length and lower bound of the one
 * dimension. */
#define ARRAY_HEADER 20
#define ARRAY_FLAG_AT 4
#define ARRAY_COUNT_AT 12

void mill_params_array(struct mill_params *params, enum mill_type element)
{
	begin(params);
	params->array_at = params->bytes.len;
	put_u32(params, 1);
	put_u32(params, 0);
	put_u32(params, (uint32_t)element);
	put_u32(params, 0);
	put_u32(params, 1);
}

static void count_element(struct mill_params *params)
{
	uint32_t count;
	char *at = params->bytes.data + params->array_at + ARRAY_COUNT_AT;
	memcpy(&count, at, sizeof(count));
	count = htobe32(be32toh(count) + 1);
	memcpy(at, &count, sizeof(count));
}

void mill_element_int2(struct mill_params *params, int16_t value)
{
	put_u32(params, 2);
	put_u16(params, (uint16_t)value);
	count_element(params);
}

void mill_element_int4(struct mill_params *params, int32_t value)
{
	put_u32(params, 4);
	put_u32(params, (uint32_t)value);
	count_element(params);
}

void mill_element_int8(struct mill_params *params, int64_t value)
{
	put_u32(params, 8);
	put_u64(params, (uint64_t)value);
	count_element(params);
}

void mill_element_float8(struct mill_params *params, double value)
{
	put_u32(params, 8);
	put_u64(params, float_bits(value));
	count_element(params);
}

void mill_element_text(struct mill_params *params, struct mill_span text)
{
	if (text.data == NULL) {
		uint32_t flag = htobe32(1);
		memcpy(params->bytes.data + params->array_at + ARRAY_FLAG_AT, &flag, sizeof(flag));
		put_u32(params, UINT32_MAX);
	} else {
		put_u32(params, (uint32_t)text.len);
		mill_buffer_bytes(&params->bytes, text.data, text.len);
	}
	count_element(params);
}

void mill_element_uuid(struct mill_params *params, const uint8_t id[16])
{
	put_u32(params, 16);
	mill_buffer_bytes(&params->bytes, id, 16);
	count_element(params);
}

void mill_params_array_end(struct mill_params *params)
{
	MILL_ASSERT(params->bytes.len >= params->array_at + ARRAY_HEADER);
	end(params);
}
