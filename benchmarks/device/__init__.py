"""Work queues on the device and graphs of its own, measured (docs/device.md)."""
