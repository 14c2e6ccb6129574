// Makes the runner of the peers harness count whole process trees.
//
// The runner reads the CPU time and the peak memory of a system from /proc/PID of the command it
// started. The peers are one process each. Ours are three and more: the adapter, the runtime, and an
// executor per core or so. Reading only the first would show next to nothing and take the others for
// disturbance. So from the moment this file is loaded (by plan.mjs, into the runner's own process),
// reading one of the two files for a child of the runner gives the numbers of that child and all its
// descendants: CPU times added up, those of ended descendants included, and peaks added up, which is
// the most that the tree can have used at once, pages that its processes share counted several times.
// For a system of one process nothing changes.
import fs from 'node:fs'

const read = fs.readFileSync

// The text of /proc/PID/stat in two: what comes up to the state, and the fields from the state on.
function statOf (pid) {
  const text = read(`/proc/${pid}/stat`, 'latin1')
  const split = text.lastIndexOf(')') + 2
  return { head: text.slice(0, split), fields: text.slice(split).split(' ') }
}

function childrenOf (pid) {
  try {
    return fs.readdirSync(`/proc/${pid}/task`)
      .flatMap(task => read(`/proc/${pid}/task/${task}/children`, 'latin1').split(' ').filter(Boolean))
  } catch {
    return [] // it has ended
  }
}

const descendantsOf = pid => childrenOf(pid).flatMap(child => [child, ...descendantsOf(child)])

const PARENT = 1
const USER = 11 // then system, and the same of the children that have ended
const isChild = pid => +statOf(pid).fields[PARENT] === process.pid

function statOfTree (pid) {
  const { head, fields } = statOf(pid)
  let sum = 0
  for (const member of [pid, ...descendantsOf(pid)]) {
    try {
      sum += statOf(member).fields.slice(USER, USER + 4).reduce((total, ticks) => total + +ticks, 0)
    } catch {} // it has ended since
  }
  fields.splice(USER, 2, sum, 0)
  return head + fields.join(' ')
}

const peak = /^(VmHWM:\s+)(\d+)/m

function statusOfTree (pid) {
  let sum = 0
  for (const member of [pid, ...descendantsOf(pid)]) {
    try {
      sum += +peak.exec(read(`/proc/${member}/status`, 'latin1'))[2]
    } catch {}
  }
  return read(`/proc/${pid}/status`, 'latin1').replace(peak, (_, name) => name + sum)
}

const readers = { stat: statOfTree, status: statusOfTree }

fs.readFileSync = (path, ...rest) => {
  const [, pid, file] = /^\/proc\/(\d+)\/(stat|status)$/.exec(path) ?? []
  return pid && isChild(pid) ? readers[file](pid) : read(path, ...rest)
}
