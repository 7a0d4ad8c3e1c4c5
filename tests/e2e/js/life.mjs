// Sandboxes through the unmodified JavaScript SDK: from create to gone.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { AuthenticationError, CommandExitError, NotFoundError, Sandbox, SandboxError } from 'e2b'

const soon = (ms) => new Promise((done) => setTimeout(done, ms))

test('create, run, kill', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: { js: 'yes & no', n: '1' }, envs: { A: 'ä' } })
  try {
    assert.equal((await sandbox.commands.run('echo $A')).stdout, 'ä\n')
    assert.equal(await sandbox.isRunning(), true)
    const info = await sandbox.getInfo()
    assert.equal(info.sandboxId, sandbox.sandboxId)
    assert.deepEqual(info.metadata, { js: 'yes & no', n: '1' })
    assert.equal(info.state, 'running')
    assert.ok(info.endAt.getTime() - Date.now() > 60_000)
    await sandbox.setTimeout(300_000)
    assert.ok((await sandbox.getInfo()).endAt.getTime() - Date.now() > 250_000)
    const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 5_000 })
    assert.equal((await again.commands.run('cat /run/e2b/.E2B_SANDBOX_ID')).stdout.trim(), sandbox.sandboxId)
    assert.ok((await sandbox.getInfo()).endAt.getTime() - Date.now() > 200_000)
    assert.equal(sandbox.getHost(8080), `8080-${sandbox.sandboxId}.${process.env.ATOLL_DOMAIN}`)
  } finally {
    assert.equal(await sandbox.kill(), true)
  }
  assert.equal(await sandbox.kill(), false)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.getInfo(), NotFoundError)
  await assert.rejects(Sandbox.connect(sandbox.sandboxId), NotFoundError)
})

test('list in pages, by metadata and state', async () => {
  const mark = `js-${process.pid}-${Date.now()}`
  const made = await Promise.all([0, 1, 2].map(() => Sandbox.create({ timeoutMs: 60_000, metadata: { mark } })))
  try {
    const paginator = Sandbox.list({ query: { metadata: { mark }, state: ['running'] }, limit: 2 })
    const found = []
    while (paginator.hasNext) found.push(...(await paginator.nextItems()))
    assert.deepEqual(found.map((one) => one.sandboxId).sort(), made.map((one) => one.sandboxId).sort())
  } finally {
    await Promise.all(made.map((one) => one.kill()))
  }
  const left = await Sandbox.list({ query: { metadata: { mark } } }).nextItems()
  assert.deepEqual(left, [])
})

test('what cannot be is told', async () => {
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
  await assert.rejects(Sandbox.create('no-such-template'), /no-such-template/)
  const resting = await Sandbox.create({ timeoutMs: 120_000 })
  await resting.files.write('/home/user/kept.txt', 'kept')
  const counting = await resting.commands.run('i=0; while true; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done', { background: true })
  assert.equal(await resting.pause(), true)
  assert.equal((await Sandbox.getInfo(resting.sandboxId)).state, 'paused')
  const back = await Sandbox.connect(resting.sandboxId, { timeoutMs: 60_000 })
  assert.equal(await back.files.read('/home/user/kept.txt'), 'kept')
  const count = async () => { let said = ''; while (said === '') said = await back.files.read('/tmp/count'); return Number(said) }
  const first = await count()
  await new Promise((done) => setTimeout(done, 500))
  assert.ok((await count()) > first, 'the process that counts goes on')
  assert.ok((await back.commands.list()).some((one) => one.pid === counting.pid), 'and is listed')
  assert.equal(await back.kill(), true)
})

test('a moment is kept, begun from and forked', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000 })
  const others = []
  try {
    await sandbox.files.write('/home/user/kept.txt', 'kept')
    const { snapshotId } = await sandbox.createSnapshot()
    await sandbox.files.write('/home/user/kept.txt', 'changed since')
    assert.deepEqual((await sandbox.listSnapshots().nextItems()).map((one) => one.snapshotId), [snapshotId])
    others.push(await Sandbox.create(snapshotId, { timeoutMs: 60_000 }))
    assert.equal(await others[0].files.read('/home/user/kept.txt'), 'kept')
    const forks = await sandbox.fork({ count: 2, timeoutMs: 60_000 })
    others.push(...forks)
    for (const fork of forks) assert.equal(await fork.files.read('/home/user/kept.txt'), 'changed since')
    assert.equal(new Set([sandbox, ...others].map((one) => one.sandboxId)).size, 4)
    await others.shift().kill()
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
    await assert.rejects(Sandbox.create(snapshotId), SandboxError)
  } finally {
    for (const one of [sandbox, ...others]) await one.kill()
  }
})

test('what it uses', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000 })
  try {
    const found = await sandbox.getMetrics()
    assert.ok(found.at(-1).memUsed > 0 && found.at(-1).memTotal === 512 * 1024 * 1024)
    assert.ok((await Sandbox.getMetrics(sandbox.sandboxId)).length >= found.length)
    assert.deepEqual(await sandbox.getMetrics({ start: new Date(Date.now() + 3_600_000) }), [])
  } finally {
    await sandbox.kill()
  }
})

test('a timeout ends it', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 3_000 })
  const end = (await sandbox.getInfo()).endAt.getTime()
  while (await sandbox.isRunning()) {
    assert.ok(Date.now() < end + 1_000, 'it outlived its end by more than a second')
    await soon(50)
  }
  assert.ok(Date.now() > end - 1_000)
})

test('kill cuts what runs', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000 })
  const running = sandbox.commands.run('sleep 100', { timeoutMs: 0 })
  const told = assert.rejects(running, (error) => !(error instanceof CommandExitError) && /was killed or reached|not found|terminated/i.test(error.message))
  await soon(500)
  await sandbox.kill()
  await told
  await assert.rejects(sandbox.commands.run('true'))
})
