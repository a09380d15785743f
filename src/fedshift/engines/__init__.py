"""Engines: how many clients' local work is executed. They know no method; methods know no engine."""
