// The code interpreter through its unmodified JavaScript SDK: in a sandbox of its own, or at INTERPRETER_URL, where only its server is.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Sandbox } from '@e2b/code-interpreter'

const url = process.env.INTERPRETER_URL
let sandbox

before(async () => {
  if (url) {
    sandbox = new Sandbox({
      sandboxId: 'i'.repeat(21),
      sandboxDomain: 'localhost',
      envdVersion: '0.6.13',
      apiKey: 'e2b_' + '0'.repeat(40),
      sandboxUrl: url,
    })
  } else {
    sandbox = await Sandbox.create({ timeoutMs: 300_000 })
  }
})

after(async () => {
  if (!url && sandbox) await sandbox.kill()
})

test('values stay, and output comes while the code runs', async () => {
  await sandbox.runCode('x = 20')
  const seen = []
  const ended = await sandbox.runCode('print("one", flush=True)\nx += 1\nx', { onStdout: (said) => seen.push(said.line) })
  assert.equal(ended.text, '21')
  assert.deepEqual(seen, ['one\n'])
  assert.equal(ended.error, undefined)
})

test('errors have name, value and traceback', async () => {
  const { error } = await sandbox.runCode('1 / 0')
  assert.equal(error.name, 'ZeroDivisionError')
  assert.equal(error.value, 'division by zero')
  assert.match(error.traceback, /ZeroDivisionError/)
})

test('charts are pictures and data', async () => {
  const ended = await sandbox.runCode("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2.5])\nplt.title('Sums')\nplt.show()")
  const [shown] = ended.results
  assert.ok(shown.png.startsWith('iVBOR'))
  assert.equal(shown.chart.type, 'bar')
  assert.equal(shown.chart.title, 'Sums')
  assert.deepEqual(shown.chart.elements.map((bar) => [bar.label, bar.value]), [['a', 1], ['b', 2.5]])
})

test('other languages', async () => {
  const typed = await sandbox.runCode("const one: number = 20; console.log('said'); one + 1", { language: 'typescript' })
  assert.equal(typed.text, '21')
  assert.deepEqual(typed.logs.stdout, ['said\n'])
  assert.equal((await sandbox.runCode('await Promise.resolve(5) * 2', { language: 'js' })).text, '10')
  assert.deepEqual((await sandbox.runCode('cd /; pwd', { language: 'bash' })).logs.stdout, ['/\n'])
})

test('contexts are apart, restarted and removed', async () => {
  const context = await sandbox.createCodeContext({ cwd: '/tmp', language: 'python' })
  assert.equal(context.cwd, '/tmp')
  assert.ok((await sandbox.listCodeContexts()).some((one) => one.id === context.id))
  await sandbox.runCode('apart = 1', { context })
  assert.equal((await sandbox.runCode('import os; os.getcwd()', { context })).text, '/tmp')
  assert.equal((await sandbox.runCode('apart')).error.name, 'NameError')
  await sandbox.restartCodeContext(context)
  assert.equal((await sandbox.runCode('apart', { context })).error.name, 'NameError')
  await sandbox.removeCodeContext(context)
  assert.ok(!(await sandbox.listCodeContexts()).some((one) => one.id === context.id))
})

test('what takes too long ends, and the next execution is answered', async () => {
  const context = await sandbox.createCodeContext()
  await assert.rejects(sandbox.runCode('import time\ntime.sleep(600)', { context, timeoutMs: 1000 }), /timeout|timed out/i)
  assert.equal((await sandbox.runCode('1 + 1', { context, timeoutMs: 60_000 })).text, '2')
})
