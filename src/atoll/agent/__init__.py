"""The host's shell: one process that acts for a host, dials control, and drives what can hold sandboxes.

Read `agent.py` first (what runs beside what), then `record.py` (what is known of one placement, and what it should become),
`executor.py` (how it gets there) and `session.py` (how control hears of it). Imports everything above it but `control`.

    config = AgentConfig(state_directory=path, control_url=url, facts=read_facts(path))
    identity = load_identity(config.credential_path) or (await obtain(config, registration, connect=..., admit=by_token(token))).identity
    transport = HttpTransport(url, identity.credential)
    agent = Agent(config, identity, drivers={Isolation.GVISOR: driver}, clock=clock, dice=os.urandom, transport=transport)
    loop.add_signal_handler(signal.SIGTERM, agent.stop)
    raise SystemExit(await agent.run())                                    # 0: asked to stop, 75: a newer run has taken over
"""
