"""What tests of Atoll and of its drivers need, shipped: the driver conformance suite, the simulator, a service in memory."""
