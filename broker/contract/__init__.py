"""What the ports promise, as tests: each transport runs the class of a port against itself.

A test module subclasses ``WorkQueueContract`` (or another one) and says how to connect. Nothing here imports a test
framework or a transport.
"""
