-- busted's helper, loaded once before the spec files. What is required here stays loaded for the
-- whole run; busted forgets after each spec file what that file itself required.
require "ffi"
require "lfs"
require "spec.support.clock"
require "spec.support.folder"
require "spec.support.process"
require "spec.support.pg"
require "spec.support.unit"
require "spec.support.tidemill"
