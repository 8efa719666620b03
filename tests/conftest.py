"""Lets every test folder import the shared helpers that lie beside this file."""
