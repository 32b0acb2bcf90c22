"""Scores that other people's code gives: a function written for TRL, a scorer on another machine."""
