"""Trajectories: attempts of several model calls (turns), recorded as exact tokens.

    tree     tokens of a trajectory, and the samples that it is trained by
    bridges  tokens between two turns: what a chat template puts between an answer and the next one
    parsing  messages out of sampled tokens: text, reasoning, tool calls
    chat     the language of a model: the last two together
    recorder asks the model for each next message, within limits, and keeps the tokens of all turns

Sampled tokens are never made again from text. No sockets, no engine. Groups of single answers, which are all that
rollout actors sample today, do not need them.
"""
