"""The methods to put documents in front of a question, one file each."""
