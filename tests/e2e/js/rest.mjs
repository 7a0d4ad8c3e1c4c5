// Rest through the unmodified JavaScript SDK: every way to pause, to come back, to keep a moment and to fork.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { NotFoundError, Sandbox } from 'e2b'

const soon = (ms) => new Promise((done) => setTimeout(done, ms))
const bootId = async (sandbox) => (await sandbox.files.read('/proc/sys/kernel/random/boot_id')).trim()
const paused = async (sandbox) => {
  const until = Date.now() + 30_000
  while ((await Sandbox.getInfo(sandbox.sandboxId)).state !== 'paused') {
    assert.ok(Date.now() < until, 'it is paused at its timeout')
    await soon(200)
  }
}
const using = async (options, body) => {
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, ...options })
  const others = []
  try {
    await body(sandbox, others)
  } finally {
    for (const one of [sandbox, ...others]) await one.kill()
  }
}

test('each form of pause, and connect', async () => {
  await using({}, async (sandbox) => {
    await sandbox.files.write('/home/user/kept.txt', 'kept')
    await sandbox.commands.run('sleep 1000', { background: true })
    const forms = [
      () => sandbox.pause(),
      () => sandbox.betaPause(),
      () => Sandbox.pause(sandbox.sandboxId),
      () => Sandbox.betaPause(sandbox.sandboxId),
    ]
    const boot = await bootId(sandbox)
    for (const pause of forms) {
      assert.equal(await pause(), true)
      assert.equal(await pause(), false, 'it is paused already')
      assert.equal((await Sandbox.list({ query: { state: ['paused'] } }).nextItems()).some((one) => one.sandboxId === sandbox.sandboxId), true)
      const back = await sandbox.connect({ timeoutMs: 90_000 })
      assert.equal(back.sandboxId, sandbox.sandboxId)
      assert.equal(await back.files.read('/home/user/kept.txt'), 'kept')
      assert.equal(await bootId(back), boot, 'memory outlasts it')
      assert.equal((await back.commands.run('pgrep -c sleep')).stdout.trim(), '1')
      assert.ok((await back.getInfo()).endAt.getTime() - Date.now() < 95_000, 'it lives for as long as connect says')
    }
  })
})

test('without its memory it boots anew, with its files', async () => {
  await using({}, async (sandbox) => {
    await sandbox.files.write('/home/user/kept.txt', 'kept')
    await sandbox.commands.run('sleep 1000', { background: true })
    const boot = await bootId(sandbox)
    assert.equal(await sandbox.pause({ keepMemory: false }), true)
    const back = await Sandbox.connect(sandbox.sandboxId)
    assert.equal(await back.files.read('/home/user/kept.txt'), 'kept')
    assert.notEqual(await bootId(back), boot)
    assert.equal((await back.commands.run('pgrep -c sleep || true')).stdout.trim(), '0')
  })
})

test('at its timeout it is paused, and traffic wakes it', async () => {
  await using({ timeoutMs: 3_000, lifecycle: { onTimeout: 'pause', autoResume: true } }, async (sandbox) => {
    assert.deepEqual((await sandbox.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
    await sandbox.files.write('/home/user/kept.txt', 'kept')
    await paused(sandbox)
    assert.equal(await sandbox.files.read('/home/user/kept.txt'), 'kept', 'a call of the SDK is traffic, too')
    const info = await sandbox.getInfo()
    assert.equal(info.state, 'running')
    assert.ok(info.endAt.getTime() - Date.now() > 200_000, 'woken by traffic it lives for five minutes')
  })
})

test('at its timeout it is paused without its memory, and nothing but connect wakes it', async () => {
  await using({ timeoutMs: 3_000, lifecycle: { onTimeout: { action: 'pause', keepMemory: false } } }, async (sandbox) => {
    assert.deepEqual((await sandbox.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: false })
    await sandbox.files.write('/home/user/kept.txt', 'kept')
    const boot = await bootId(sandbox)
    await paused(sandbox)
    await assert.rejects(sandbox.files.read('/home/user/kept.txt'))
    assert.equal((await Sandbox.getInfo(sandbox.sandboxId)).state, 'paused')
    const back = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 60_000 })
    assert.equal(await back.files.read('/home/user/kept.txt'), 'kept')
    assert.notEqual(await bootId(back), boot)
  })
})

test('a timeout that kills, said as an object', async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 2_000, lifecycle: { onTimeout: { action: 'kill' } } })
  const until = Date.now() + 30_000
  for (;;) {
    const found = await Sandbox.getInfo(sandbox.sandboxId).catch((error) => error)
    if (found instanceof NotFoundError) break
    assert.ok(Date.now() < until)
    await soon(200)
  }
})

test('moments by name, and forks, of a sandbox that is named', async () => {
  await using({ metadata: { of: 'rest' } }, async (sandbox, others) => {
    await sandbox.files.write('/home/user/kept.txt', 'kept')
    const name = `js-rest-${process.pid}`
    const kept = await Sandbox.createSnapshot(sandbox.sandboxId, { name })
    try {
      others.push(await Sandbox.create(name, { timeoutMs: 60_000 }))
      assert.equal(await others[0].files.read('/home/user/kept.txt'), 'kept')
      const forks = await Sandbox.fork(sandbox.sandboxId, { count: 3, timeoutMs: 60_000 })
      assert.equal(forks.filter((one) => one instanceof Sandbox).length, 3)
      others.push(...forks)
      const ids = await Promise.all(forks.map(async (one) => (await one.commands.run('cat /run/e2b/.E2B_SANDBOX_ID')).stdout.trim()))
      assert.deepEqual(ids, forks.map((one) => one.sandboxId), 'each knows who it is')
      assert.equal(await forks[0].pause(), true)
      const back = await Sandbox.connect(forks[0].sandboxId)
      assert.equal(await back.files.read('/home/user/kept.txt'), 'kept', 'a clone rests as any other')
    } finally {
      for (const one of others.splice(0)) await one.kill()
      assert.equal(await Sandbox.deleteSnapshot(kept.snapshotId), true)
    }
  })
})
