"""Intake: parse the records of senders, validate and identify them, and route them.

`native_envelope` reads the headers, `json_envelopes` the other contracts; `query` has the steps.
"""
