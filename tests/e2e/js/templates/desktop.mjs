// A desktop through its unmodified JavaScript SDK: seen, clicked, typed on, its windows, and its streams.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Sandbox } from '@e2b/desktop'

let desktop

before(async () => {
  desktop = await Sandbox.create({ resolution: [1024, 768], timeoutMs: 900_000 })
})

after(async () => {
  await desktop?.kill()
})

async function hasWindow(title) {
  const seen = await desktop.waitAndVerify('xdotool getactivewindow getwindowname', (ran) => ran.stdout.includes(title), 90)
  assert.ok(seen, `no window ${title}`)
}

async function geometry(window) {
  const { stdout } = await desktop.commands.run(`xwininfo -id ${window}`)
  const [x, y, width, height] = [...stdout.matchAll(/(?:Absolute upper-left [XY]|Width|Height): +(-?\d+)/g)].map((found) => Number(found[1]))
  return { x, y, width, height }
}

// What RFB says first: after version and a look at the door, the size of what is shown.
async function streamed() {
  const probe = [
    'import socket, struct',
    "s = socket.create_connection(('127.0.0.1', 5900))",
    's.sendall(s.recv(12))',
    'kinds = s.recv(s.recv(1)[0])',
    "s.sendall(b'\\x01')",
    'assert s.recv(4) == bytes(4), kinds',
    "s.sendall(b'\\x01')",
    "print(*struct.unpack('>HH', s.recv(4)))",
  ].join('\n')
  await desktop.files.write('/tmp/probe.py', probe)
  return (await desktop.commands.run('python3 /tmp/probe.py')).stdout.trim().split(' ').map(Number)
}

test('it is seen', async () => {
  const picture = Buffer.from(await desktop.screenshot())
  assert.equal(picture.subarray(1, 4).toString(), 'PNG')
  assert.deepEqual([picture.readUInt32BE(16), picture.readUInt32BE(20)], [1024, 768])
  assert.deepEqual(await desktop.getScreenSize(), { width: 1024, height: 768 })
})

test('mouse, keyboard and windows', async () => {
  await desktop.moveMouse(333, 222)
  assert.deepEqual(await desktop.getCursorPosition(), { x: 333, y: 222 })
  await desktop.launch('org.xfce.mousepad')
  await hasWindow('Mousepad')
  const window = await desktop.getCurrentWindowId()
  const [found] = await desktop.getApplicationWindows('mousepad')
  assert.match(await desktop.getWindowTitle(found), /Mousepad/)
  // What has the keyboard is that window, or its own child.
  assert.match(await desktop.getWindowTitle(window), /Mousepad|^$/)
  await desktop.wait(1000)
  await desktop.write('typed by an agent')
  await desktop.press(['ctrl', 's'])
  await hasWindow('Save As')
  // A dialog has its window before it listens: on a slow machine what is typed at once is lost.
  let saved = false
  for (let tries = 0; tries < 6 && !saved; tries++) {
    await desktop.wait(1000 + 1000 * tries)
    await desktop.press(['ctrl', 'a'])
    await desktop.write('/home/user/typed-js.txt')
    await desktop.press('enter')
    saved = await desktop.waitAndVerify('xdotool getactivewindow getwindowname', (ran) => ran.stdout.includes('typed-js.txt - Mousepad'), 10)
  }
  assert.ok(saved, 'nothing was saved')
  assert.equal((await desktop.files.read('/home/user/typed-js.txt')).trim(), 'typed by an agent')
})

test('a button that is held moves a window by its title', async () => {
  const [window] = await desktop.getApplicationWindows('mousepad')
  const before = await geometry(window)
  await desktop.moveMouse(before.x + 150, before.y - 14)
  await desktop.mousePress()
  for (const step of [1, 2]) {
    await desktop.wait(300)
    await desktop.moveMouse(before.x + 150 + 40 * step, before.y - 14 + 30 * step)
  }
  await desktop.wait(300)
  await desktop.mouseRelease()
  await desktop.wait(1000)
  const moved = await geometry(window)
  assert.ok(Math.abs(moved.x - before.x - 80) < 30 && Math.abs(moved.y - before.y - 60) < 30, JSON.stringify([before, moved]))
})

test('the screen and one window are streamed', async () => {
  await desktop.stream.start()
  const url = new URL(desktop.stream.getUrl())
  assert.equal(url.host, desktop.getHost(6080))
  assert.deepEqual(await streamed(), [1024, 768])
  await desktop.stream.stop()
  const [window] = await desktop.getApplicationWindows('mousepad')
  const shown = await geometry(window)
  await desktop.stream.start({ windowId: window })
  const [width, height] = await streamed()
  assert.deepEqual([width, height], [shown.width, shown.height])
  await desktop.stream.stop()
})
