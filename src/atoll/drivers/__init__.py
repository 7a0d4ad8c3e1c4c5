"""Isolation technologies and providers behind one port. Read `port.py`; each other module here is a directory of one driver.

Drivers may import everything above them (hostops, images, wire, domain, base), never control or agent.
"""
