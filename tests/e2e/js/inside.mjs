// What is inside a sandbox through the unmodified JavaScript SDK: commands, terminals, files, watching, signed URLs.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { AuthenticationError, CommandExitError, FilesystemEventType, FileType, InvalidArgumentError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

const soon = (ms) => new Promise((done) => setTimeout(done, ms))
const text = new TextDecoder()

async function until(condition, what, withinMs = 10_000) {
  const end = Date.now() + withinMs
  while (!condition()) {
    assert.ok(Date.now() < end, `waited in vain for ${what}`)
    await soon(50)
  }
}

let sandbox
before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { FROM: 'create' } })
})
after(async () => {
  await sandbox?.kill()
})

test('commands', async () => {
  const seen = []
  const result = await sandbox.commands.run('echo out; echo err >&2; echo $FROM $MORE', { envs: { MORE: 'run' }, onStdout: (data) => seen.push(data) })
  assert.equal(result.stdout, 'out\ncreate run\n')
  assert.equal(result.stderr, 'err\n')
  assert.equal(seen.join(''), result.stdout)
  await assert.rejects(sandbox.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
  await assert.rejects(sandbox.commands.run('sleep 30', { timeoutMs: 1_000 }), TimeoutError)
  await assert.rejects(sandbox.commands.run('true', { cwd: '/nowhere' }), InvalidArgumentError)
  await assert.rejects(sandbox.commands.run('true', { user: 'ghost' }), AuthenticationError)
  assert.equal((await sandbox.commands.run('whoami', { user: 'root' })).stdout, 'root\n')
  const large = await sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
  assert.equal(large.stdout.length, 3_000_000)
})

test('background, input, connect, kill', async () => {
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(cat.pid, 'typed\n')
  await cat.closeStdin()
  assert.equal((await cat.wait()).stdout, 'typed\n')
  const loop = await sandbox.commands.run('for i in $(seq 30); do echo $i; sleep 0.1; done', { background: true })
  assert.ok((await sandbox.commands.list()).some((one) => one.pid === loop.pid))
  await loop.disconnect()
  const again = await sandbox.commands.connect(loop.pid)
  assert.ok((await again.wait()).stdout.endsWith('29\n30\n'))
  const sleeper = await sandbox.commands.run('sleep 100', { background: true })
  assert.equal(await sleeper.kill(), true)
  await assert.rejects(sleeper.wait(), CommandExitError)
  assert.equal(await sandbox.commands.kill(sleeper.pid), false)
})

test('terminal', async () => {
  const said = []
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: (data) => said.push(text.decode(data)) })
  await sandbox.pty.resize(terminal.pid, { cols: 120, rows: 40 })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; echo mark-$((40 + 2)); exit\n'))
  await terminal.wait()
  assert.match(said.join(''), /40 120/)
  assert.match(said.join(''), /mark-42/)
})

test('files', async () => {
  const path = '/tmp/js/deep/file.txt'
  const content = 'obsah 🐎\n'
  for (const options of [{}, { useOctetStream: true }, { gzip: true }]) {
    const info = await sandbox.files.write(path, content, options)
    assert.equal(info.path, path)
    assert.equal(await sandbox.files.read(path), content)
  }
  assert.equal(await sandbox.files.read(path, { gzip: true }), content)
  assert.deepEqual(Buffer.from(await sandbox.files.read(path, { format: 'bytes' })), Buffer.from(content))
  assert.equal(await (await sandbox.files.read(path, { format: 'blob' })).text(), content)
  const chunks = []
  for await (const chunk of await sandbox.files.read(path, { format: 'stream' })) chunks.push(chunk)
  assert.equal(Buffer.concat(chunks).toString(), content)
  const written = await sandbox.files.write([1, 2, 3].map((n) => ({ path: `/tmp/js/many/${n}`, data: `content ${n}` })))
  assert.equal(written.length, 3)
  assert.equal(await sandbox.files.read('/tmp/js/many/2'), 'content 2')
  const bytes = new Uint8Array(5 << 20).map((_, index) => (index * 31) & 255)
  await sandbox.files.write('/tmp/js/large', bytes.buffer)
  assert.ok(Buffer.from(await sandbox.files.read('/tmp/js/large', { format: 'bytes' })).equals(Buffer.from(bytes)))
  assert.deepEqual((await sandbox.files.list('/tmp/js')).map((one) => one.name), ['deep', 'large', 'many'])
  const info = await sandbox.files.getInfo(path)
  assert.equal(info.type, FileType.FILE)
  assert.equal(info.owner, 'user')
  assert.equal(await sandbox.files.makeDir('/tmp/js/deep'), false)
  assert.equal((await sandbox.files.rename('/tmp/js/deep', '/tmp/js/moved')).path, '/tmp/js/moved')
  assert.equal(await sandbox.files.exists(path), false)
  await sandbox.files.remove('/tmp/js')
  await assert.rejects(sandbox.files.read(path), NotFoundError)
  await sandbox.files.write('/tmp/tagged', 'x', { metadata: { source: 'js' } })
  assert.deepEqual((await sandbox.files.getInfo('/tmp/tagged')).metadata, { source: 'js' })
})

test('watching', async () => {
  await sandbox.files.makeDir('/tmp/watched')
  const seen = []
  const handle = await sandbox.files.watchDir('/tmp/watched', (event) => { seen.push(event) }, { recursive: true, includeEntry: true })
  await sandbox.files.write('/tmp/watched/new', 'x')
  await until(() => seen.length >= 3, 'three events')
  assert.deepEqual(seen.slice(0, 3).map((one) => one.type), [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE])
  await sandbox.files.makeDir('/tmp/watched/sub')
  await until(() => seen.some((one) => one.name === 'sub'), 'the new directory')
  await soon(300)
  await sandbox.files.write('/tmp/watched/sub/below', 'x')
  await until(() => seen.some((one) => one.name === 'sub/below'), 'an event below the new directory')
  await handle.stop()
  await assert.rejects(sandbox.files.watchDir('/tmp/none', () => {}), NotFoundError)
})

test('signed URLs', async () => {
  const form = new FormData()
  form.append('file', new Blob(['by url']), 'signed.txt')
  const sent = await fetch(await sandbox.uploadUrl('/tmp/signed.txt'), { method: 'POST', body: form })
  assert.equal(sent.status, 200, await sent.text())
  const got = await fetch(await sandbox.downloadUrl('/tmp/signed.txt', { useSignatureExpiration: 60 }))
  assert.equal(await got.text(), 'by url')
})
