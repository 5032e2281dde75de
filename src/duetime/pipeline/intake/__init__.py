"""Intake: parse the records of senders, validate and identify them, and route them.

`envelopes` has the contracts of senders, `canonical_request` what they have in common, and `query`
the steps.
"""
