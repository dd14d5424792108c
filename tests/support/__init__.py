"""What tests of several folders share: ranks, references, inputs, and how programs are run."""
