"""The record of what agents and the model said to each other, token by token. Pure: plain data and functions."""
