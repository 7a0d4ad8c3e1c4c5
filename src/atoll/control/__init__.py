"""The control plane's shell: loads facts, asks `planning`, commits, and tells hosts. `api` speaks to clients, `loops` act by themselves.

Read `service.py` for what can be asked of it, then `loops/reconcile.py`. Of drivers it sees nothing but what agents report.
"""
