"""The figures that are promised of the core: two classes in one process, backlogs, several GPUs, the launcher's CPU."""
