// Templates through the unmodified JavaScript SDK: built from steps, used, named.
import assert from 'node:assert/strict'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import { Sandbox, Template, waitForPort } from 'e2b'

const options = { cpuCount: 1, memoryMB: 512 }
const name = () => `js-${process.pid}-${Math.random().toString(36).slice(2, 8)}`

async function forget(alias) {
  await fetch(`${process.env.E2B_API_URL}/templates/${alias}`, { method: 'DELETE', headers: { 'X-API-KEY': process.env.E2B_API_KEY } })
}

test('steps, files, start command', async () => {
  const alias = name()
  const context = mkdtempSync(join(tmpdir(), 'atoll-js-'))
  writeFileSync(join(context, 'page.html'), `page of ${alias}`)
  const template = Template({ fileContextPath: context })
    .fromTemplate('base')
    .setEnvs({ WORD: alias })
    .copy('page.html', '/srv/web/')
    .runCmd('echo $WORD > /home/user/word')
    .setWorkdir('/srv/web')
    .setStartCmd('python3 -m http.server 8000', waitForPort(8000))
  try {
    assert.equal(await Template.exists(alias), false)
    const log = []
    const info = await Template.build(template, alias, { ...options, onBuildLogs: (entry) => log.push(entry.message) })
    assert.ok(info.templateId)
    assert.ok(log.some((line) => line.includes('[3/')), log.join('\n'))
    assert.ok(log.some((line) => line.includes('the start command is ready')), log.join('\n'))
    assert.equal(await Template.exists(alias), true)
    const sandbox = await Sandbox.create(alias, { timeoutMs: 60_000 })
    try {
      assert.equal((await sandbox.commands.run('cat /home/user/word')).stdout, `${alias}\n`)
      assert.equal((await sandbox.commands.run('curl -s localhost:8000/page.html || python3 -c "import urllib.request as u; print(u.urlopen(\'http://localhost:8000/page.html\').read().decode(), end=\'\')"')).stdout, `page of ${alias}`)
    } finally {
      await sandbox.kill()
    }
    const again = []
    await Template.build(template, alias, { ...options, onBuildLogs: (entry) => again.push(entry.message) })
    assert.equal(again.filter((line) => line.startsWith('CACHED')).length, 3, again.join('\n'))
  } finally {
    await forget(alias)
  }
})

test('a failed step', async () => {
  const alias = name()
  const template = Template().fromTemplate('base').runCmd('echo why >&2; exit 9')
  try {
    await assert.rejects(Template.build(template, alias, options), /exit status 9/)
  } finally {
    await forget(alias)
  }
})

test('tags', async () => {
  const alias = name()
  const template = Template().fromTemplate('base').runCmd('echo tagged > tagged')
  try {
    const info = await Template.build(template, `${alias}:v1`, options)
    await Template.assignTags(`${alias}:v1`, ['stable'])
    const tags = await Template.getTags(alias)
    assert.deepEqual(tags.map((one) => one.tag).sort(), ['stable', 'v1'])
    assert.ok(tags.every((one) => one.buildId === info.buildId))
    await Template.removeTags(alias, ['stable'])
    assert.deepEqual((await Template.getTags(alias)).map((one) => one.tag), ['v1'])
  } finally {
    await forget(alias)
  }
})
