// Guests that were made ahead (their ids are in ATOLL_WARM), through the unmodified JavaScript SDK.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox } from 'e2b'

test('two creates get what was made ahead, and share nothing', async () => {
  const ahead = new Set(process.env.ATOLL_WARM.split(','))
  const made = await Promise.all(
    ['one', 'other'].map((name) => Sandbox.create({ timeoutMs: 120_000, metadata: { name }, envs: { NAME: name } })),
  )
  try {
    assert.deepEqual(new Set(made.map((one) => one.sandboxId)), ahead)
    const said = await Promise.all(made.map((one) => one.commands.run('echo $NAME; hostname; head -c 32 /dev/urandom | base64')))
    const [mine, theirs] = said.map((one) => one.stdout.trim().split('\n'))
    assert.deepEqual([mine[0], theirs[0]], ['one', 'other'])
    assert.deepEqual([mine[1], theirs[1]], made.map((one) => one.sandboxId))
    assert.notEqual(mine[2], theirs[2])
    await made[0].files.write('/home/user/here', 'x')
    assert.equal(await made[1].files.exists('/home/user/here'), false)
    const info = await made[1].getInfo()
    assert.deepEqual(info.metadata, { name: 'other' })
    assert.ok(info.endAt.getTime() - Date.now() > 60_000 && info.endAt.getTime() - Date.now() < 125_000)
  } finally {
    await Promise.all(made.map((one) => one.kill()))
  }
})
