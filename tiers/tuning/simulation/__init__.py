"""Discrete-event simulation of a chain's decisions and their time, without bytes."""
