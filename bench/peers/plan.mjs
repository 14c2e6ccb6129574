// Tidemill and the two peers in one plan for the runner of the peers harness (bench/README.md says
// how to run it). Case names: system, phase, settings; tm is Tidemill.
import { fileURLToPath } from 'node:url'
import './process_tree.mjs'

export const systems = {
  tidemill: ['luajit', fileURLToPath(new URL('tidemill.lua', import.meta.url))],
  // Of the harness, which runs commands in its own folder.
  'graphile-worker': ['node', 'graphile_worker.mjs'],
  'pg-boss': ['node', 'pg_boss.mjs']
}

// Divides the number of jobs, for a look whether everything works: SCALE=100.
const scale = Number(process.env.SCALE ?? 1)
const many = n => Math.max(10, Math.ceil(n / scale))

const tm = { name: 'tm', system: 'tidemill' }
const gw = { name: 'gw', system: 'graphile-worker' }
const pb = { name: 'pb', system: 'pg-boss' }

const drain = (who, label, n, work, workers = 1, more = {}) =>
  ({ id: `${who.name}.drain.${label}.w${workers}`, system: who.system, phase: 'drain', n: many(n), workers, work, ...more })
const enqueue = (who, label, n, options, setup) =>
  ({ id: `${who.name}.enqueue.${label}`, system: who.system, phase: 'enqueue', n: many(n), enqueue: options, setup })
const latency = (who, label, work, setup) =>
  ({ id: `${who.name}.latency.${label}`, system: who.system, phase: 'latency', n: many(1000), every: 10, work, setup })
const idle = (who, label, work, setup) =>
  ({ id: `${who.name}.idle.${label}`, system: who.system, phase: 'idle', seconds: scale > 1 ? 3 : 20, work, setup })

const fast = { profile: 'fast' }
const defaults = { profile: 'default' }
const notify = { notify: true }
const fastNotify = { ...fast, ...notify }

export const cases = [
  // Publishing: one by one, each call awaited; ten at a time over ten connections; in bulk.
  enqueue(tm, 'single', 10000, { mode: 'single' }),
  enqueue(gw, 'single', 10000, { mode: 'single' }),
  enqueue(pb, 'single', 10000, { mode: 'single' }, notify),
  enqueue(tm, 'single10', 20000, { mode: 'single', inflight: 10 }),
  enqueue(gw, 'single10', 20000, { mode: 'single', inflight: 10 }),
  enqueue(pb, 'single10', 20000, { mode: 'single', inflight: 10 }, notify),
  enqueue(tm, 'bulk1000', 100000, { mode: 'bulk', batch: 1000 }),
  enqueue(gw, 'bulk1000', 100000, { mode: 'bulk', batch: 1000 }),
  enqueue(pb, 'bulk1000', 100000, { mode: 'bulk', batch: 1000 }),
  enqueue(tm, 'bulk10000', 100000, { mode: 'bulk', batch: 10000 }),
  enqueue(gw, 'bulk10000', 100000, { mode: 'bulk', batch: 10000 }),
  enqueue(pb, 'bulk10000', 100000, { mode: 'bulk', batch: 10000 }),

  // Draining, no-op handlers: best settings of one worker, of several, and no settings at all.
  drain(tm, 'fast', 100000, fast),
  drain(gw, 'fast', 100000, fast),
  drain(pb, 'fast', 100000, fast),
  drain(tm, 'fast.x2', 100000, { ...fast, executors: 2 }),
  drain(tm, 'fast.b100', 100000, { ...fast, batch: 100 }),
  drain(tm, 'fast.b1000', 100000, { ...fast, batch: 1000, concurrency: 2000 }),
  drain(tm, 'fast', 100000, fast, 2),
  drain(gw, 'fast', 100000, fast, 2),
  drain(pb, 'fast', 100000, fast, 2),
  drain(gw, 'fast', 100000, fast, 4),
  drain(tm, 'default', 100000, defaults),
  drain(gw, 'default', 10000, defaults),
  drain(pb, 'default', 10, defaults),

  // From the publisher's answer to the handler's start, in an idle worker.
  latency(tm, 'fast', fast),
  latency(tm, 'default', defaults),
  latency(gw, 'fast', fast),
  latency(gw, 'default', defaults),
  latency(pb, 'notify', fastNotify, notify),

  // Nothing to do.
  idle(tm, 'fast', fast),
  idle(tm, 'default', defaults),
  idle(gw, 'fast', fast),
  idle(pb, 'notify', fastNotify, notify)
]

// Only when asked for by name: --only big, a longer drain; --only long, a drain while another session
// holds an old snapshot open.
const named = { byName: true }
cases.push(
  ...[tm, gw, pb].map(who => ({ ...drain(who, 'fast', 500000, fast, 1, named) }))
    .map(c => ({ ...c, id: `big.${c.id}` })),
  ...[tm, gw, pb].map(who => ({ ...drain(who, 'fast', 100000, fast, 1, { ...named, longtx: true }) }))
    .map(c => ({ ...c, id: `long.${c.id}` }))
)
