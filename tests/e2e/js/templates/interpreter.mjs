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

const DOT = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=='

test('pictures come from every language that makes them', async () => {
  const python = await sandbox.runCode(`import base64\nfrom IPython.display import Image, SVG, display\ndisplay(Image(base64.b64decode('${DOT}')))\nSVG('<svg xmlns="http://www.w3.org/2000/svg"/>')`)
  assert.equal(python.results[0].png.replace(/\s/g, ''), DOT)
  assert.ok(python.results[1].svg.startsWith('<svg'))
  assert.ok(python.results[1].isMainResult)
  const js = await sandbox.runCode(`await Deno.jupyter.display({ 'image/png': '${DOT}', 'text/plain': 'a dot' }, { raw: true })`, { language: 'js' })
  assert.equal(js.error, undefined)
  assert.equal(js.results[0].png, DOT)
  assert.equal(js.results[0].text, 'a dot')
  assert.deepEqual([...js.results[0].formats()], ['png'])
})

test('a kernel that dies is told, and the next one answers', async () => {
  for (const [language, end, next] of [
    ['python', 'import os; os._exit(1)', '40 + 2'],
    ['python', 'import os, signal; os.kill(os.getpid(), signal.SIGKILL)', '40 + 2'],
    ['js', 'Deno.kill(Deno.pid, "SIGKILL"); await new Promise(() => {})', '40 + 2'],
  ]) {
    const context = await sandbox.createCodeContext({ language })
    const { error } = await sandbox.runCode(end, { context })
    assert.equal(error?.name, 'KernelDied', language)
    assert.equal((await sandbox.runCode(next, { context })).text, '42', language)
    await sandbox.removeCodeContext(context)
  }
})
