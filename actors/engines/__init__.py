"""Engines that serve the policy, behind one small protocol, and the HTTP client that rollouts use."""
