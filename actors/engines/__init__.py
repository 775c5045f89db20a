"""Engines that sample from the policy, behind a small protocol (`protocol.Engine`)."""
